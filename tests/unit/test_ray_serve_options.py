"""What turning the service on changes in a deployment, and how hints get into a request."""

from types import SimpleNamespace
from typing import Any

import pytest

from tiered_kv.errors import BadConfig
from tiered_kv.integrations.ray_serve import enable
from tiered_kv.integrations.ray_serve.headers import with_headers
from tiered_kv.integrations.ray_serve.options import ROUTER
from tiered_kv.integrations.vllm import MODULE, NAME
from tiered_kv.integrations.vllm.hints import FIELD, hints


class Config(SimpleNamespace):
    """The part of an `LLMConfig` that `enable` touches."""

    def __init__(self, engine: dict[str, Any] | None = None, deployment: Any = None) -> None:
        super().__init__(
            engine_kwargs=engine or {}, deployment_config=deployment or {}, runtime_env=None
        )

    def update_engine_kwargs(self, **kwargs: Any) -> None:
        self.engine_kwargs.update(kwargs)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [n for n in os.environ if n.startswith("TIERED_KV_")]:
        monkeypatch.delenv(name)


def test_enable_sets_connector_hashes_and_router():
    config = Config()
    enable(config)
    transfer = config.engine_kwargs["kv_transfer_config"]
    assert transfer["kv_connector"] == NAME
    assert transfer["kv_connector_module_path"] == MODULE
    assert transfer["kv_role"] == "kv_both"
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert config.engine_kwargs["prefix_caching_hash_algo"] == "sha256_cbor"
    router = config.deployment_config["request_router_config"]
    assert router["request_router_class"] == ROUTER
    assert router["request_router_kwargs"] == {"namespace": "tiered_kv"}


def test_enable_twice_changes_nothing_more():
    config = Config()
    enable(config)
    once = repr(config)
    enable(config)
    assert repr(config) == once


def test_what_the_user_has_set_stays():
    config = Config(
        {
            "kv_transfer_config": {
                "kv_connector": NAME,
                "kv_load_failure_policy": "fail",
                "kv_connector_extra_config": {"verify": 1.0},
            },
            "prefix_caching_hash_algo": "sha256",
            "tensor_parallel_size": 4,
        },
        {"request_router_config": {"request_router_class": "mine.Router"}, "num_replicas": 3},
    )
    enable(config)
    transfer = config.engine_kwargs["kv_transfer_config"]
    assert transfer["kv_load_failure_policy"] == "fail"
    assert transfer["kv_connector_extra_config"] == {"verify": 1.0}
    assert transfer["kv_role"] == "kv_both"
    assert config.engine_kwargs["prefix_caching_hash_algo"] == "sha256"
    assert config.engine_kwargs["tensor_parallel_size"] == 4
    assert config.deployment_config == {
        "request_router_config": {"request_router_class": "mine.Router"}, "num_replicas": 3,
    }  # fmt: skip


def test_router_settings_without_a_class_get_ours():
    config = Config(deployment={"request_router_config": {"request_routing_stats_period_s": 9.0}})
    enable(config)
    router = config.deployment_config["request_router_config"]
    assert router["request_router_class"] == ROUTER
    assert router["request_routing_stats_period_s"] == 9.0


def test_another_connector_is_refused_by_name():
    config = Config({"kv_transfer_config": {"kv_connector": "NixlConnector"}})
    with pytest.raises(BadConfig, match="NixlConnector"):
        enable(config)
    assert config.engine_kwargs == {"kv_transfer_config": {"kv_connector": "NixlConnector"}}


def test_two_connectors_are_the_users_to_compose():
    both = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {
            "connectors": [{"kv_connector": "NixlConnector"}, {"kv_connector": NAME}]
        },
    }
    config = Config({"kv_transfer_config": both})
    enable(config)
    assert config.engine_kwargs["kv_transfer_config"] is both
    without = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": []}}
    with pytest.raises(BadConfig, match="MultiConnector"):
        enable(Config({"kv_transfer_config": without}))


def test_variables_of_the_service_reach_the_replicas(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TIERED_KV_SERVICE_NAMESPACE", "blue")
    monkeypatch.setenv("TIERED_KV_DRAM_BYTES", "8MiB")
    config = Config()
    config.runtime_env = {"env_vars": {"TIERED_KV_DRAM_BYTES": "9MiB"}, "pip": ["x"]}
    enable(config)
    assert config.runtime_env == {
        "env_vars": {"TIERED_KV_SERVICE_NAMESPACE": "blue", "TIERED_KV_DRAM_BYTES": "9MiB"},
        "pip": ["x"],
    }
    router = config.deployment_config["request_router_config"]
    assert router["request_router_kwargs"] == {"namespace": "blue"}


def test_a_configuration_that_is_not_valid_is_refused_where_the_application_is_built(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("TIERED_KV_DRAM_BYTES", "much")
    with pytest.raises(BadConfig, match="much"):
        enable(Config())


# -- hints ------------------------------------------------------------------------------------


def test_headers_become_hints_of_the_request():
    headers = {
        "X-Session-ID": " chat-1 ", "x-kv-session-ended": "true", "x_kv_pause_s": "12.5",
        "x-kv-priority": "-3", "x-kv-no-store": "1", "authorization": "secret",
    }  # fmt: skip
    params = with_headers(headers, None)
    assert params == {
        FIELD: {
            "session": "chat-1", "ended": True, "pause_s": 12.5, "priority": -3, "store": False,
        }
    }  # fmt: skip
    found = hints(params)
    assert (found.session, found.ended, found.bad) == ("chat-1", True, 0)


def test_the_body_wins_over_headers_and_other_parameters_stay():
    body = {FIELD: {"session": "body"}, "do_remote_prefill": True}
    params = with_headers({"x-session-id": "header", "x-kv-pause-s": "3"}, body)
    assert params == {FIELD: {"session": "body", "pause_s": 3}, "do_remote_prefill": True}
    assert body == {FIELD: {"session": "body"}, "do_remote_prefill": True}


def test_a_request_that_says_nothing_gets_nothing():
    assert with_headers({}, None) is None
    assert with_headers({"content-type": "x"}, {}) is None
    assert with_headers({}, {"a": 1}) == {"a": 1}


@pytest.mark.parametrize(
    "headers",
    [
        {"x-session-id": "no spaces"},
        {"x-session-id": "x" * 129},
        {"x-kv-pause-s": "soon"},
        {"x-kv-pause-s": "nan"},
        {"x-kv-priority": "1.5"},
        {"x-kv-session-ended": "maybe"},
        {"x-kv-no-store": "maybe"},
    ],
)
def test_a_hint_that_makes_no_sense_is_counted_and_nothing_else(headers: dict[str, str]):
    found = hints(with_headers(headers, None))
    assert found.bad == 1
    assert (found.session, found.pause_s, found.priority) == (None, None, None)
    assert (found.ended, found.store) == (False, True)


def test_the_name_of_the_session_header_can_be_another_one():
    params = with_headers({"x-conversation": "c"}, None, "X_Conversation")
    assert params == {FIELD: {"session": "c"}}
