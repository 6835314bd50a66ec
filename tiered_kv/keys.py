"""Block keys: a keyed hash, chained over namespace, parent and tokens.

    namespace = H(secret, "ns" | layout fingerprint)
    key[0]    = H(secret, namespace | tokens[0])
    key[i]    = H(secret, key[i-1] | tokens[i])
    engine    = H'(secret, namespace | an engine's own chained hash)

H is BLAKE2b with a 16-byte digest (RFC 7693), keyed with the tenant's secret: who does not know
the secret can neither name nor guess another tenant's blocks. H' is H personalised, so that no
sequence of tokens can be chosen to look like an engine's hash. Tokens are packed as little-endian
u32, so equal keys mean equal tokens from the first one on, in every process, on every machine and
under every hash seed. Test vectors: `tests/unit/test_keys.py` and docs/keys.md.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tiered_kv.errors import BadInput
from tiered_kv.layout import KVLayout
from tiered_kv.types import BlockKey

KEY_BYTES = 16
MAX_TOKEN = 0xFFFF_FFFF
MAX_SECRET_BYTES = 64

Tokens = Sequence[int] | npt.NDArray[np.integer]


class Chain(NamedTuple):
    """The keys of a token sequence. `tail` of them (0 or 1) names an incomplete last block."""

    keys: list[BlockKey]
    tail: int


def namespace(layout: KVLayout, secret: bytes) -> BlockKey:
    """Key under which every chain of this layout and tenant starts."""
    if not isinstance(secret, bytes):
        raise BadInput(f"a tenant secret must be bytes, not {type(secret).__name__}")
    if not 1 <= len(secret) <= MAX_SECRET_BYTES:
        raise BadInput(f"a tenant secret has 1 to {MAX_SECRET_BYTES} bytes, not {len(secret)}")
    return _hash(secret, b"ns" + layout.fingerprint)


def pack_tokens(tokens: Tokens) -> bytes:
    """Little-endian u32 of each token. Raises `BadInput` naming the first that does not fit."""
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadInput(f"tokens must be integers: {error}") from None
    if array.ndim != 1:
        raise BadInput(f"tokens must be one-dimensional, not of shape {list(array.shape)}")
    if array.size and array.dtype.kind not in "iu":  # 1.5 would become 1, and "7" would become 7
        raise BadInput(f"tokens must be integers below 2**63, not {array.dtype}")
    bad = (array < 0) | (array > MAX_TOKEN)
    if bad.any():
        raise BadInput(f"token {int(array[bad][0])} is not in 0..{MAX_TOKEN}")
    return array.astype("<u4").tobytes()


def chain(layout: KVLayout, secret: bytes, tokens: Tokens) -> Chain:
    """Keys of all blocks of `tokens`, the last of which may be incomplete.

    O(tokens); about 1.5 us a block of 256 tokens. An incomplete block's key covers exactly the
    tokens it holds, so it is never taken for the complete one that follows it later.
    """
    packed = pack_tokens(tokens)
    parent = namespace(layout, secret)
    step = 4 * layout.block_tokens
    keys: list[BlockKey] = []
    for start in range(0, len(packed), step):
        parent = _hash(secret, parent + packed[start : start + step])
        keys.append(parent)
    return Chain(keys, int(len(packed) % step != 0))


def from_engine(layout: KVLayout, secret: bytes, hashes: Sequence[bytes]) -> list[BlockKey]:
    """Keys from an engine's own chained block hashes, moved into our namespace.

    Raises `BadInput` for a hash that is not bytes, or empty.
    """
    root = namespace(layout, secret)
    for one in hashes:
        if not isinstance(one, bytes) or not one:
            raise BadInput(f"an engine's block hash must be bytes, not {one!r}")
    return [_hash(secret, root + one, b"tieredkv.engine") for one in hashes]


def _hash(secret: bytes, data: bytes, person: bytes = b"") -> BlockKey:
    return BlockKey(
        hashlib.blake2b(data, digest_size=KEY_BYTES, key=secret, person=person).digest()
    )
