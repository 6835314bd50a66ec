"""What a user may say in `kv_connector_extra_config`, checked once at the start."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tiered_kv import settings
from tiered_kv.config import Config
from tiered_kv.errors import BadConfig

LOADS = ("async", "layerwise")


@dataclass(frozen=True)
class Options:
    """`service` is a section of the configuration as in `tiered_kv.connect(service={...})`."""

    config: Config
    address: str | None = None  # of Ray: "auto", "host:port"; None: RAY_ADDRESS, or found here
    block_tokens: int = 256  # tokens of a block of ours; cut to whole engine pages
    load: str = "async"  # layerwise: the engine waits layer by layer, in the step that computes
    lookup_wait_s: float = 0.5  # a lookup that takes longer is a miss
    save_wait_s: float = 2.0  # a save that could not begin by then is dropped
    revision: str = ""  # of the weights; "": read from the files
    verify: float = 0.02  # share of the loaded blocks whose bytes are compared
    save_generated: bool = True  # keep what was generated, and not only prompts


def options(given: Mapping[str, Any]) -> Options:
    """Options from an extra config. Raises `BadConfig` naming what is unknown or malformed."""
    known = {one.name: one for one in fields(Options) if one.name != "config"}
    values = dict(given)
    service = values.pop("service", {})
    for name, value in values.items():
        if name not in known:
            names = ", ".join(sorted([*known, "service"]))
            raise BadConfig(f"kv_connector_extra_config has no {name!r}; there are {names}")
        _check(name, value)
    return Options(config=settings.load(overrides={"service": service}), **values)


def _check(name: str, value: object) -> None:
    what = f"kv_connector_extra_config: {name} = {value!r}"
    match name:
        case "load":
            if value not in LOADS:
                raise BadConfig(f"{what} is not one of {', '.join(LOADS)}")
        case "block_tokens":
            if type(value) is not int or value < 1:
                raise BadConfig(f"{what} is not a positive integer")
        case "lookup_wait_s" | "save_wait_s":
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise BadConfig(f"{what} is not a positive number of seconds")
        case "verify":
            if not isinstance(value, int | float) or not 0 <= value <= 1:
                raise BadConfig(f"{what} is not in 0..1")
        case "save_generated":
            if not isinstance(value, bool):
                raise BadConfig(f"{what} is neither true nor false")
        case _:
            if value is not None and not isinstance(value, str):
                raise BadConfig(f"{what} is not a string")
