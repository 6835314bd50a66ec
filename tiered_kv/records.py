"""Sessions as bytes, for the index beside the NVMe data. No pickle: a header and raw keys."""

import json

from tiered_kv.errors import BadInput
from tiered_kv.inputs import check_count, short
from tiered_kv.keys import KEY_BYTES
from tiered_kv.sessions import Session, check_session, session_id
from tiered_kv.types import BlockKey, Fingerprint

VERSION = 1


def dump(session: Session) -> bytes:
    """`<length of header, 4 bytes little-endian><header, JSON><keys><tokens>`."""
    header = json.dumps(
        {
            "version": VERSION,
            "id": session.id,
            "layout": session.layout.hex(),
            "blocks": len(session.run),
            "n_tokens": session.n_tokens,
            "tail": session.tail,
            "used_s": session.used_s,
            "token_bytes": len(session.tokens),
        }
    ).encode()
    return len(header).to_bytes(4, "little") + header + b"".join(session.run) + session.tokens


def load(data: bytes) -> Session:
    """The session. Raises `BadInput` saying what is wrong with the bytes."""
    try:
        size = int.from_bytes(data[:4], "little")
        header = json.loads(data[4 : 4 + size])
        if header["version"] != VERSION:
            raise BadInput(f"session record of version {short(header['version'])}, not {VERSION}")
        check_count("blocks", header["blocks"])
        check_count("token_bytes", header["token_bytes"])
        keys_end = 4 + size + KEY_BYTES * header["blocks"]
        if len(data) != keys_end + header["token_bytes"]:
            raise BadInput(f"session record of {len(data)} bytes is torn")
        run = tuple(BlockKey(data[i : i + KEY_BYTES]) for i in range(4 + size, keys_end, KEY_BYTES))
        return check_session(
            Session(
                id=session_id(header["id"]),
                layout=Fingerprint(bytes.fromhex(header["layout"])),
                run=run,
                n_tokens=header["n_tokens"],
                tail=header["tail"],
                used_s=header["used_s"],
                tokens=data[keys_end:],
            )
        )
    except BadInput:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"session record cannot be read: {error!r}") from None
