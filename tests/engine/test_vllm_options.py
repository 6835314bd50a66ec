"""The connector's extra config: what is unknown or malformed is named at the start."""

from typing import Any

import pytest

from tiered_kv.errors import BadConfig
from tiered_kv.integrations.vllm.options import Options, options


def test_nothing_given_is_the_defaults() -> None:
    found = options({})
    assert found.block_tokens == 256
    assert found.load == "async"
    assert found.address is None
    assert found == options({"service": {}})


def test_a_service_section_reaches_the_configuration() -> None:
    found = options({"service": {"namespace": "mine", "lease_ttl_s": 7.0}, "verify": 1})
    assert found.config.service.namespace == "mine"
    assert found.config.service.lease_ttl_s == 7.0
    assert found.verify == 1


def test_equal_options_are_one_key_of_the_processes_links() -> None:
    given = {"block_tokens": 64, "service": {"namespace": "mine"}}
    assert {options(given): "one"}[options(dict(given))] == "one"


def test_an_unknown_name_is_told_with_the_known_ones() -> None:
    with pytest.raises(BadConfig, match=r"no 'block_token'; there are .*block_tokens.*service"):
        options({"block_token": 64})


def test_an_unknown_field_of_the_service_is_refused() -> None:
    with pytest.raises(BadConfig, match="nonsense"):
        options({"service": {"nonsense": 1}})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("load", "sometimes"),
        ("load", None),
        ("block_tokens", 0),
        ("block_tokens", 64.0),
        ("block_tokens", True),
        ("lookup_wait_s", 0),
        ("lookup_wait_s", "1"),
        ("save_wait_s", True),
        ("save_wait_s", float("nan")),
        ("verify", 1.5),
        ("verify", -0.1),
        ("verify", "all"),
        ("save_generated", "yes"),
        ("address", 6379),
        ("revision", 3),
    ],
)
def test_a_malformed_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(BadConfig, match=f"{name} = "):
        options({name: value})


def test_all_options_can_be_given() -> None:
    given = {
        "address": "auto",
        "block_tokens": 64,
        "load": "layerwise",
        "lookup_wait_s": 0.2,
        "save_wait_s": 1,
        "revision": "mine",
        "verify": 0,
        "save_generated": False,
    }
    found = options(given)
    assert isinstance(found, Options)
    assert {name: getattr(found, name) for name in given} == given
