"""What the bytes of a block mean."""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property

from tiered_kv.errors import BadLayout
from tiered_kv.types import ALIGNMENT, Fingerprint

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
MAX_BLOCK_BYTES = 1 << 34
"""16 GiB: no model needs more for a block; larger values are mistakes."""


@dataclass(frozen=True)
class KVLayout:
    """The layout of one block: `block_tokens` tokens of all layers of one TP rank.

    Two blocks may stand for each other only when every field is equal, therefore every field is
    in `fingerprint` and, through it, in each key. `engine` names whoever defines the order of
    bytes inside a block (and its version, platform and ISA where these change it): two engines
    never share by accident. `planes` is 2 for K and V, 1 for a joint latent (MLA).
    """

    model: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    revision: str = ""
    block_tokens: int = 256
    planes: int = 2
    engine: str = "hf:layers,planes,heads,tokens,dim"
    tp_rank: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        for name in ("model", "dtype", "revision", "engine"):
            if not isinstance(getattr(self, name), str):
                raise BadLayout(f"{name} must be a string, not {getattr(self, name)!r}")
        if self.dtype not in DTYPE_BYTES:
            raise BadLayout(f"dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        for name in ("layers", "kv_heads", "head_dim", "block_tokens", "tp_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise BadLayout(f"{name} must be a positive integer, not {value!r}")
        if type(self.planes) is not int or self.planes not in (1, 2):
            raise BadLayout(f"planes must be 1 or 2, not {self.planes!r}")
        if type(self.tp_rank) is not int or not 0 <= self.tp_rank < self.tp_size:
            raise BadLayout(f"tp_rank {self.tp_rank!r} is not in 0..{self.tp_size - 1}")
        if not self.model or not self.engine:
            raise BadLayout("model and engine must not be empty")
        if self.block_bytes > MAX_BLOCK_BYTES:
            raise BadLayout(f"a block of {self.block_bytes} bytes exceeds {MAX_BLOCK_BYTES}")

    @property
    def token_bytes(self) -> int:
        """Bytes of KV of one token."""
        return self.layers * self.planes * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def payload_bytes(self) -> int:
        """Bytes of a block that carry KV; the rest of `block_bytes` is padding."""
        return self.token_bytes * self.block_tokens

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, padded to the I/O alignment."""
        return -(-self.payload_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """`[layers, planes, kv_heads, tokens, head_dim]` of a block of the `hf` engine order.

        Heads before tokens, so that a slice of a transformers cache is copied in runs of
        `tokens * head_dim` elements.
        """
        return (self.layers, self.planes, self.kv_heads, self.block_tokens, self.head_dim)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """16 bytes that change with any field; the same in every process and release."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return Fingerprint(
            hashlib.blake2b(text.encode(), digest_size=16, person=b"tieredkv.layout").digest()
        )

    def describe(self) -> str:
        """One line for error messages and `status`."""
        return (
            f"{self.model}@{self.revision or '-'} {self.dtype} {self.layers}x{self.kv_heads}x"
            f"{self.head_dim} block {self.block_tokens} tokens tp {self.tp_rank}/{self.tp_size} "
            f"[{self.engine}] {self.fingerprint.hex()}"
        )
