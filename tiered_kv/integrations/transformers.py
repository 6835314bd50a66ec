"""Save and resume the KV cache of a transformers model, exactly.

`save` and `resume` are what a chat loop needs. Below them, `layout_of` names what a model's blocks
mean, `pack_slot` copies a stretch of its cache into a slot, `unpack` makes a cache of blocks again.
What cannot be resumed exactly is refused.
"""

from tiered_kv.integrations.hf_layout import ENGINE, layout_of, new_cache, weights_digest
from tiered_kv.integrations.hf_packing import (
    check_cache,
    dtype_of,
    pack,
    pack_slot,
    slot_tensor,
    unpack,
)
from tiered_kv.integrations.hf_sessions import Resumed, resume, save

__all__ = [
    "ENGINE",
    "Resumed",
    "check_cache",
    "dtype_of",
    "layout_of",
    "new_cache",
    "pack",
    "pack_slot",
    "resume",
    "save",
    "slot_tensor",
    "unpack",
    "weights_digest",
]
