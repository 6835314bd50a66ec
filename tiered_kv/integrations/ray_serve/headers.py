"""Hints of a request that came as headers, put where the engine's connector reads them.

| header | `kv_transfer_params["tiered_kv"]` | meaning |
|---|---|---|
| `x-session-id` | `session` | which conversation this is a turn of |
| `x-kv-session-ended` | `ended` | no turn follows: its blocks may leave first |
| `x-kv-pause-s` | `pause_s` | seconds until the next turn, as far as the client can tell |
| `x-kv-priority` | `priority` | a whole number; what is lower leaves first |
| `x-kv-no-store` | `store: false` | do not keep what this request computes |

Pure. The body wins over headers: it was written by whoever wrote the request. What makes no sense
is passed on as it is, and `integrations.vllm.hints` ignores and counts it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tiered_kv.integrations.vllm.hints import FIELD

FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def with_headers(
    headers: Mapping[str, str], params: object, session_header: str = "x-session-id"
) -> dict[str, Any] | None:
    """`kv_transfer_params` of a request: its own `params`, and what its headers say.

    Header names are compared without case, `-` and `_` being one: proxies rewrite them. None when
    nothing was said at all. Never raises.
    """
    plain = {_name(name): value.strip() for name, value in headers.items()}
    said: dict[str, Any] = {}
    for header, hint, convert in (
        (_name(session_header), "session", str),
        ("x-kv-session-ended", "ended", _flag),
        ("x-kv-pause-s", "pause_s", _number),
        ("x-kv-priority", "priority", _number),
        ("x-kv-no-store", "store", _no),
    ):
        if plain.get(header):
            said[hint] = convert(plain[header])
    given = dict(params) if isinstance(params, Mapping) else {}
    if not said:
        return given or None
    own = given.get(FIELD)
    return given | {FIELD: said | (dict(own) if isinstance(own, Mapping) else {})}


def _name(header: str) -> str:
    return header.lower().replace("_", "-")


def _flag(text: str) -> bool | str:
    return FLAGS.get(text.lower(), text)


def _no(text: str) -> bool | str:
    flag = _flag(text)
    return flag if isinstance(flag, str) else not flag


def _number(text: str) -> int | float | str:
    kinds: tuple[Callable[[str], int | float], ...] = (int, float)
    for kind in kinds:
        try:
            return kind(text)
        except ValueError:
            continue
    return text
