"""What names a model's weights: any bit of them, and nothing else."""

import json
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.errors import BadLayout
from tiered_kv.integrations.vllm import weights
from tiered_kv.integrations.vllm.weights import local, revision_of

CONFIG = {"hidden_size": 64, "rope_theta": 10_000.0}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tiered_kv" / "weights.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "a.safetensors").write_bytes(bytes(range(256)) * 40)
    (folder / "sub" / "b.bin").write_bytes(b"x" * 5000)
    return folder


def revision(model: Path | str, config: dict[str, Any] | None = None, **more: Any) -> str:
    given = {"load_format": "auto", "seed": 0} | more
    return revision_of(str(model), CONFIG if config is None else config, **given)


def test_the_same_files_in_another_folder_are_the_same_weights(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    assert revision(tmp_path / "copy") == revision(model)


def test_a_link_to_a_folder_is_the_folder(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model)
    assert revision(tmp_path / "link") == revision(model)


def test_one_byte_makes_other_weights(model: Path) -> None:
    before = revision(model)
    file = model / "a.safetensors"
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(1, 1))  # remembered by its time, which a quick write might not change
    assert revision(model) != before


def test_files_that_changed_names_or_places_are_other_weights(model: Path) -> None:
    before = revision(model)
    (model / "a.safetensors").rename(model / "c.safetensors")
    assert revision(model) != before


def test_another_file_of_weights_makes_other_weights(model: Path) -> None:
    before = revision(model)
    (model / "notes.txt").write_text("no weights")
    assert revision(model) == before
    (model / "c.safetensors").write_bytes(b"")
    assert revision(model) != before


def test_the_config_counts_but_for_where_it_came_from(model: Path) -> None:
    assert revision(model, {**CONFIG, "rope_theta": 500_000.0}) != revision(model)
    moved = {**CONFIG, "_name_or_path": "/elsewhere", "transformers_version": "9", "use_cache": 1}
    assert revision(model, moved) == revision(model)
    assert revision(model, dict(reversed(CONFIG.items()))) == revision(model)


def test_dummy_weights_are_named_by_their_seed_and_read_nothing(tmp_path: Path) -> None:
    one = revision(tmp_path / "none", load_format="dummy")
    assert one == revision("other/none", load_format="dummy")
    assert one != revision("other/none", load_format="dummy", seed=1)


def test_a_single_file_is_named_by_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "one.gguf").write_bytes(b"weights")
    shutil.copy(tmp_path / "one.gguf", tmp_path / "two.gguf")
    first = revision(tmp_path / "one.gguf")
    (tmp_path / "one.gguf").write_bytes(b"WEIGHTS")
    os.utime(tmp_path / "one.gguf", ns=(1, 1))
    assert revision(tmp_path / "one.gguf") != first


def test_weights_that_are_nowhere_ask_for_a_revision(tmp_path: Path) -> None:
    for missing in ("org/no-such-model", tmp_path / "none", "s3://bucket/model"):
        with pytest.raises(BadLayout, match=r"kv_connector_extra_config=\{'revision'"):
            revision(missing)


# -- the hub --------------------------------------------------------------------------------


def snapshot(root: Path, commit: str = COMMIT, name: str = "org--name") -> Path:
    folder = root / f"models--{name}" / "snapshots" / commit
    folder.mkdir(parents=True)
    refs = root / f"models--{name}" / "refs"
    refs.mkdir(exist_ok=True)
    (refs / "main").write_text(commit)
    (folder / "config.json").write_text("{}")
    (folder / "a.safetensors").write_bytes(b"weights")
    return folder


def test_a_snapshot_of_the_hub_is_named_by_its_commit_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = snapshot(tmp_path / "a"), snapshot(tmp_path / "b")
    (there / "a.safetensors").unlink()
    monkeypatch.setattr(weights, "_digest", lambda *args: pytest.fail("a file was read"))
    assert revision(here) == revision(f"{there}/")


def test_another_commit_or_model_of_the_hub_is_other_weights(tmp_path: Path) -> None:
    one = revision(snapshot(tmp_path))
    assert revision(snapshot(tmp_path, "f" * 40)) != one
    assert revision(snapshot(tmp_path, COMMIT, "org--other")) != one


def test_a_name_of_the_hub_is_its_snapshot_in_the_cache(tmp_path: Path) -> None:
    folder = snapshot(tmp_path)
    found = local("org/name", None, str(tmp_path))
    assert Path(found) == folder
    assert revision(found) == revision(folder)
    assert local("org/name", COMMIT, str(tmp_path)) == found


def test_what_is_not_in_the_cache_stays_as_it_was_named(tmp_path: Path) -> None:
    snapshot(tmp_path)
    for model, commit in [("org/none", None), ("org/name", "v2"), ("s3://a/b/c", None), ("", None)]:
        assert local(model, commit, str(tmp_path)) == model
    assert local(str(tmp_path), None, None) == str(tmp_path)


# -- remembering ----------------------------------------------------------------------------


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    reads: list[int] = []
    digest = weights.xxhash.xxh3_128
    monkeypatch.setattr(weights.xxhash, "xxh3_128", lambda: (reads.append(1), digest())[1])
    return reads


def test_files_are_read_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = count_reads(monkeypatch)
    first = revision(model)
    assert len(reads) == 2
    assert revision(model) == first
    assert len(reads) == 2
    file = model / "a.safetensors"
    os.utime(file, ns=(1, 1))  # touched: read again, and found to be the same
    assert revision(model) == first
    assert len(reads) == 3


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": {"b": 1}}', "\x00\xff"])
def test_a_broken_memory_is_replaced(model: Path, cache: Path, text: str) -> None:
    before = revision(model)
    cache.write_text(text)
    assert revision(model) == before
    assert set(json.loads(cache.read_text()).values()) != set()


def test_memory_that_is_not_text_is_replaced(model: Path, cache: Path) -> None:
    before = revision(model)
    cache.write_bytes(b"\xff\xfe\x00")
    assert revision(model) == before


def test_without_a_place_to_remember_every_call_reads(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = revision(model)
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    reads = count_reads(monkeypatch)
    assert revision(model) == before
    assert revision(model) == before
    assert len(reads) == 4


def _rank(model: str, read: Any, answers: Any) -> None:
    digest = weights._digest

    def counted(file: Path, known: dict[str, str]) -> str:
        if not any(name.startswith(f"{os.path.realpath(file)} ") for name in known):
            with read.get_lock():
                read.value += 1
        return digest(file, known)

    weights._digest = counted
    answers.put(revision(model))


def test_ranks_that_start_together_read_each_file_once(model: Path) -> None:
    context = multiprocessing.get_context("fork")
    read, answers = context.Value("i", 0), context.Queue()
    ranks = [context.Process(target=_rank, args=(str(model), read, answers)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    found = {answers.get(timeout=60) for _ in ranks}
    for rank in ranks:
        rank.join(60)
    assert found == {revision(model)}
    assert read.value == 2
