"""Ray Serve LLM keeps its KV here: one line in an `LLMConfig` turns it on.

    LLMConfig(..., server_cls="tiered_kv.integrations.ray_serve:TieredKVServer")

`enable(llm_config)` is for builders with a server class of their own, and `Sessions` is the part of
`TieredKVServer` to put in front of such a class. Importing this module imports no engine.
"""

from typing import TYPE_CHECKING, Any

from tiered_kv.integrations.ray_serve.options import enable

if TYPE_CHECKING:
    from tiered_kv.integrations.ray_serve.router import SessionRouter
    from tiered_kv.integrations.ray_serve.server import Sessions, TieredKVServer

__all__ = ["SessionRouter", "Sessions", "TieredKVServer", "enable"]


def __getattr__(name: str) -> Any:
    """The classes, imported when they are asked for: a proxy needs the router and no engine."""
    if name == "SessionRouter":
        from tiered_kv.integrations.ray_serve.router import SessionRouter

        return SessionRouter
    if name in ("Sessions", "TieredKVServer"):
        from tiered_kv.integrations.ray_serve import server

        return getattr(server, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
