"""What `import tiered_kv` offers and what it costs."""

import subprocess
import sys

import pytest

import tiered_kv
from tiered_kv import errors


def test_every_public_name_can_be_had():
    for name in tiered_kv.__all__:
        assert getattr(tiered_kv, name).__name__ == name
    assert set(tiered_kv.__all__) <= set(dir(tiered_kv))


def test_every_error_is_public():
    ours = {n for n, e in vars(errors).items() if isinstance(e, type) and issubclass(e, Exception)}
    assert ours <= set(tiered_kv.__all__)


def test_an_unknown_name_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match="module 'tiered_kv' has no attribute 'conect'"):
        _ = tiered_kv.conect


def test_importing_loads_neither_ray_nor_torch():
    script = (
        "import sys, tiered_kv; tiered_kv.KVLayout, tiered_kv.Config, tiered_kv.Unreachable;"
        "print([m for m in ('ray', 'torch', 'transformers') if m in sys.modules])"
    )
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == "[]"
