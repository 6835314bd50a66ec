"""The demo's real model: what it says after its cache went through blocks."""

import pytest
import torch

from tiered_kv.demo.documents import documents
from tiered_kv.demo.engine import first_turn, next_turn, prefill_and_answer, text_of
from tiered_kv.demo.model import ChatModel, load
from tiered_kv.integrations.transformers import (
    check_cache,
    layout_of,
    pack_slot,
    slot_tensor,
    unpack,
)


@pytest.fixture(scope="module")
def chat() -> ChatModel:
    return load()


@pytest.mark.timeout(300)
def test_a_real_chat_goes_on_from_blocks_with_the_same_words(chat: ChatModel) -> None:
    layout = layout_of(chat.model, block_tokens=256)
    document = documents(chat.tokenizer, 1, budget_tokens=400)[0]
    ids = first_turn(chat, document.text, document.first_question)
    first = prefill_and_answer(chat, ids, max_new_tokens=24)
    assert "import" in text_of(chat, first).lower()

    held = check_cache(first.cache, layout)
    slots = [i * layout.block_bytes for i in range(-(-held // 256))]
    pool = torch.full((len(slots) * layout.block_bytes,), 255, dtype=torch.uint8)
    for i, slot in enumerate(slots):
        pack_slot(first.cache, layout, i, min(256, held - 256 * i), pool, slot)
    blocks = [slot_tensor(pool, slot, layout) for slot in slots]
    restored = unpack(blocks, layout, held, chat.model.config)

    more = next_turn(chat, ids, first, document.second_question)
    kept = prefill_and_answer(chat, more, first.cache, max_new_tokens=24)
    woken = prefill_and_answer(chat, more, restored, max_new_tokens=24)
    assert woken.tokens == kept.tokens
    assert woken.prefilled == len(more) - held < len(more) // 4
    assert "step" in text_of(chat, woken).lower()
