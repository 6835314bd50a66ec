"""Conversations of a transformers model as sessions of the service."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from tiered_kv.client import Client, Saved, Woken
from tiered_kv.errors import BadLayout
from tiered_kv.integrations.hf_packing import check_cache, pack_slot, slot_tensor, unpack
from tiered_kv.layout import KVLayout


@dataclass(frozen=True, slots=True)
class Resumed:
    """A conversation that came back: its token ids, and a cache with KV of the leading ones.

    `cache` is None when nothing could be brought back; then, and for ids beyond its length, the
    model computes again. Continue with `generate(ids + new, past_key_values=cache)`.
    """

    ids: list[int]
    cache: DynamicCache | None
    woken: Woken[DynamicCache]


def save(
    kv: Client, session: str, layout: KVLayout, ids: Sequence[int], cache: Cache,
    *, durable: bool = False,
) -> Saved:  # fmt: skip
    """Save the tokens that `cache` holds KV of, which are the leading ones of `ids`.

    Costs two calls and one copy of what the pool does not hold. Raises `UnsupportedCache` and
    `BadLayout` (see `check_cache`) and what `Client.save` raises; nothing is saved then.
    """
    held = check_cache(cache, layout)
    if not 0 < held <= len(ids):
        raise BadLayout(f"the cache holds {held} tokens, and {len(ids)} token ids were given")

    def fill(index: int, tokens: int, slot: torch.Tensor) -> None:
        pack_slot(cache, layout, index, tokens, slot, 0)

    return kv.save(session, layout, ids[:held], fill, durable=durable)


def resume(
    kv: Client, session: str, layout: KVLayout, model: PreTrainedModel,
    *, deadline_s: float | None = None,
) -> Resumed:  # fmt: skip
    """Wake a session into a fresh cache on the model's device.

    Costs two calls and one copy. What cannot be brought back in `deadline_s` is a shorter cache,
    never an error. Raises `UnknownSession`, `BadSession`, `BadLayout`.
    """

    def copy(blocks: list[torch.Tensor], n_tokens: int) -> DynamicCache:
        views = [slot_tensor(block, 0, layout) for block in blocks]
        return unpack(views, layout, n_tokens, model.config, model.device)

    woken = kv.wake(session, layout, copy, deadline_s=deadline_s)
    return Resumed(woken.tokens.tolist(), woken.value, woken)
