"""Where a configuration comes from: a TOML file, the environment, overrides.

Later sources win: defaults, then the file (`TIERED_KV_CONFIG` or an argument), then environment
variables named `TIERED_KV_<SECTION>_<FIELD>`, then overrides. An unknown field, section or variable
is an error that lists the known ones.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from tiered_kv.config import Config, Dram, Hbm, Nvme, Service
from tiered_kv.errors import BadConfig
from tiered_kv.inputs import short
from tiered_kv.sizes import Size, parse_size

PREFIX = "TIERED_KV_"
NOT_FIELDS = {"TIERED_KV_CONFIG", "TIERED_KV_TRACES"}
SECTIONS: dict[str, type[Any]] = {"hbm": Hbm, "dram": Dram, "nvme": Nvme, "service": Service}
SECRET = "service.tenant_secret"
"""The field whose value is in no message."""


def load(path: str | Path | None = None, overrides: Mapping[str, Mapping[str, Any]] | None = None,
         environ: Mapping[str, str] | None = None) -> Config:  # fmt: skip
    """The configuration from all sources. Raises `BadConfig` naming field, value and source."""
    environ = os.environ if environ is None else environ
    path = path or environ.get("TIERED_KV_CONFIG")
    values: dict[str, dict[str, Any]] = {}
    if path:
        _merge(values, _read(Path(path)), str(path))
    _merge(values, _from_environment(environ), "environment")
    _merge(values, overrides or {}, "overrides")
    return Config(**{name: SECTIONS[name](**fields) for name, fields in values.items()})


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise BadConfig(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path}: {error}") from None


def _from_environment(environ: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, value in environ.items():
        if name.startswith(PREFIX) and name not in NOT_FIELDS:
            section, _, key = name[len(PREFIX) :].lower().partition("_")
            if not key:
                raise BadConfig(f"environment: {name} names no field; they are {PREFIX}<SECTION>_"
                                "<FIELD>, like TIERED_KV_DRAM_BYTES")  # fmt: skip
            found.setdefault(section, {})[key] = value
    return found


def _merge(values: dict[str, dict[str, Any]], document: Mapping[str, Any], source: str) -> None:
    """Add what a source says to `values`; it wins over what is there."""
    for name, section in document.items():
        if name not in SECTIONS:
            known = ", ".join(sorted(SECTIONS))
            raise BadConfig(f"{source}: no section {short(name)}; there are {known}")
        if not isinstance(section, Mapping):
            raise BadConfig(f"{source}: {name} must be a section, not {short(section)}")
        hints = get_type_hints(SECTIONS[name])
        for key in section:
            if key not in hints:
                raise BadConfig(f"{source}: no field {name}.{key}; there are {', '.join(hints)}")
        new = {k: _convert(hints[k], v, f"{source}: {name}.{k}") for k, v in section.items()}
        values.setdefault(name, {}).update(new)


def _convert(kind: Any, value: object, what: str) -> object:
    if kind is Size:
        try:
            return parse_size(value)
        except BadConfig as error:
            raise BadConfig(f"{what}: {error}") from None
    if get_args(kind):
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(i, str) for i in items):
            raise BadConfig(f"{what}: {value!r} is not a list of folders")
        return tuple(i for i in items if i)
    if kind is str and isinstance(value, str):
        return value
    numeric = isinstance(value, int | float | str) and not isinstance(value, bool)
    if kind in (int, float) and numeric:
        try:
            number = kind(value)
        except (ValueError, OverflowError):
            number = None
        if number is not None and (isinstance(value, str) or number == value or kind is float):
            return number
    shown = "what was given" if what.endswith(SECRET) else short(value)
    raise BadConfig(f"{what}: {shown} is not {kind.__name__}")
