"""What turning the service on changes in an `LLMConfig`. Imports neither Ray nor an engine."""

import os
from typing import Any

from tiered_kv.errors import BadConfig
from tiered_kv.inputs import short
from tiered_kv.integrations.vllm import MODULE, NAME
from tiered_kv.settings import PREFIX, load

ROUTER = "tiered_kv.integrations.ray_serve.router.SessionRouter"
STATS_PERIOD_S = 2.0
"""How often replicas tell routers what they hold."""


def enable(llm_config: Any) -> None:
    """Make the engines and the router of an `LLMConfig` use the service. Idempotent.

    Sets the connector, reproducible prefix hashes, the router, and hands this process's
    `TIERED_KV_*` variables on to the replicas; whatever the user has set stays. Raises
    `BadConfig` for a connector of another kind and for a configuration that is not valid.
    """
    namespace = load().service.namespace
    engine = llm_config.engine_kwargs
    llm_config.update_engine_kwargs(
        prefix_caching_hash_algo=engine.get("prefix_caching_hash_algo", "sha256_cbor"),
        kv_transfer_config=_transfer(engine.get("kv_transfer_config")),
    )
    deployment = llm_config.deployment_config
    deployment["request_router_config"] = _router(
        deployment.get("request_router_config"), namespace
    )
    ours = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    if ours:
        runtime_env = dict(llm_config.runtime_env or {})
        runtime_env["env_vars"] = ours | runtime_env.get("env_vars", {})
        llm_config.runtime_env = runtime_env


def _transfer(given: Any) -> dict[str, Any]:
    """`kv_transfer_config` with our connector. Two connectors are vLLM's `MultiConnector`, which
    the user composes: it stays as it is, if ours is one of them."""
    ours: dict[str, Any] = {
        "kv_connector": NAME,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    if given is None:
        return ours
    if not isinstance(given, dict):
        raise BadConfig(f"engine_kwargs['kv_transfer_config'] is {short(given)}, not a dict")
    if given.get("kv_connector") == "MultiConnector":
        inner = (given.get("kv_connector_extra_config") or {}).get("connectors") or []
        if any(isinstance(one, dict) and one.get("kv_connector") == NAME for one in inner):
            return given
    elif given.get("kv_connector", NAME) == NAME:
        return ours | given
    raise BadConfig(
        f"engine_kwargs['kv_transfer_config'] names the connector {given.get('kv_connector')!r}: "
        f"remove it, or put {NAME} beside it with vLLM's MultiConnector"
    )


def _router(given: Any, namespace: str) -> Any:
    """`request_router_config` with our router, unless the user chose one."""
    if given is not None and (not isinstance(given, dict) or "request_router_class" in given):
        return given
    ours = {
        "request_router_class": ROUTER,
        "request_router_kwargs": {"namespace": namespace},
        "request_routing_stats_period_s": STATS_PERIOD_S,
    }
    return ours | (given or {})
