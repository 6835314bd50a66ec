"""A greedy chat loop over a cache that is handed in and out."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import DynamicCache

from tiered_kv.demo.model import ChatModel
from tiered_kv.errors import BadInput
from tiered_kv.integrations.hf_layout import new_cache
from tiered_kv.integrations.hf_packing import check_cache


class Answer(NamedTuple):
    """What one turn gave.

    `cache` holds all prompt tokens and all of `tokens` but the last, which no forward pass has
    read yet. `tokens` ends with the end-of-turn token unless the limit came first.
    """

    tokens: list[int]
    cache: DynamicCache
    prefilled: int
    """Prompt tokens that were computed; the others came with the cache."""
    first_token_s: float
    decode_s: float
    """Seconds for the tokens after the first."""


def prefill_and_answer(
    chat: ChatModel,
    ids: Sequence[int],
    cache: DynamicCache | None = None,
    max_new_tokens: int = 48,
) -> Answer:
    """Greedy tokens after the prompt `ids`, computing only what `cache` does not hold.

    `cache` holds KV of the leading tokens of `ids`, at most all but the last, and is extended in
    place. On the same machine with the same number of torch threads, the same tokens and a cache
    equal in every bit give the same answer. Raises `BadInput` when the cache is longer than that
    or a number is not positive. Blocks for the whole computation.
    """
    if max_new_tokens < 1 or not ids:
        raise BadInput(f"{max_new_tokens} new tokens after a prompt of {len(ids)}: give at least 1")
    cache = new_cache(chat.model.config) if cache is None else cache
    held = check_cache(cache)
    if held >= len(ids):
        raise BadInput(
            f"the cache holds {held} tokens of a prompt of {len(ids)}: leave one to compute"
        )
    tokens: list[int] = []
    began_s = time.perf_counter()
    first_s = began_s
    step = list(ids[held:])
    with torch.inference_mode():
        while True:
            logits = chat.model(
                input_ids=torch.tensor([step]), past_key_values=cache, logits_to_keep=1
            ).logits
            token = int(logits[0, -1].argmax())
            tokens.append(token)
            if len(tokens) == 1:
                first_s = time.perf_counter()
            if len(tokens) == max_new_tokens or token == chat.tokenizer.eos_token_id:
                break
            step = [token]
    done_s = time.perf_counter()
    return Answer(tokens, cache, len(ids) - held, first_s - began_s, done_s - first_s)


def first_turn(chat: ChatModel, document: str, question: str) -> list[int]:
    """Tokens of a chat that begins with a document and a question about it."""
    return _encode(chat, _render(chat, [_user(f"{document}\n\n{question}")]))


def next_turn(chat: ChatModel, ids: Sequence[int], answer: Answer, question: str) -> list[int]:
    """Tokens of the chat that goes on: `ids`, the answer as it was generated, and a question.

    The earlier tokens are kept as they are and not made from text again, which could split
    words differently; therefore the answer's cache is a prefix of what is returned.
    """
    end = chat.tokenizer.eos_token_id
    closed = answer.tokens if answer.tokens[-1] == end else [*answer.tokens, end]
    # The template puts a system prompt before a first message; render one to cut it off.
    system = {"role": "system", "content": "."}
    head = _render(chat, [system], prompt=False)
    turn = _render(chat, [system, _user(question)])[len(head) :]
    between = head[head.rindex(str(chat.tokenizer.eos_token)) :].removeprefix(
        str(chat.tokenizer.eos_token)
    )
    return [*ids, *closed, *_encode(chat, between + turn)]


def text_of(chat: ChatModel, answer: Answer) -> str:
    """The answer as text, without the end-of-turn token."""
    return str(chat.tokenizer.decode(answer.tokens, skip_special_tokens=True)).strip()


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _render(chat: ChatModel, messages: list[dict[str, str]], prompt: bool = True) -> str:
    return str(
        chat.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    )


def _encode(chat: ChatModel, text: str) -> list[int]:
    return [int(token) for token in chat.tokenizer.encode(text, add_special_tokens=False)]
