"""Prompts as a router sees them: how long they are, and which prefixes they share.

There is no tokenizer here, and need not be one: lengths are estimates, the same for all replicas,
and a prefix is named by a hash of its text. Pure. A wrong guess costs a detour, never a token.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import xxhash

CHARS_PER_TOKEN = 4
MARK_TOKENS = 512
"""How far apart marks are, in estimated tokens: prompts that share less share nothing worth it."""
EVEN_MARKS = 64
"""So many marks are evenly spaced; from there on each is twice as far as the one before."""


class Mark(NamedTuple):
    """A prefix of a prompt: its name, and its length in estimated tokens."""

    name: int
    tokens: int


class Prompt(NamedTuple):
    """`tokens` is the estimated length, `marks` are prefixes, shortest first."""

    tokens: int
    marks: tuple[Mark, ...] = ()


def prompt_of(request: object) -> Prompt:
    """The prompt of an OpenAI request (chat, completion or embedding), O(characters).

    A request without one, or with several, has no marks.
    """
    messages = getattr(request, "messages", None)
    if messages is not None:
        text = "".join(_said(messages))
        return _marked(_seed(request), text.encode(), CHARS_PER_TOKEN)
    prompt = getattr(request, "prompt", None) or getattr(request, "input", None)
    if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes) and len(prompt) == 1:
        prompt = prompt[0] if isinstance(prompt[0], str | list) else prompt
    if isinstance(prompt, str):
        return _marked(_seed(request), prompt.encode(), CHARS_PER_TOKEN)
    if isinstance(prompt, Sequence) and prompt and all(type(i) is int for i in prompt):
        ids = b"".join((i & 0xFFFFFFFF).to_bytes(4, "little") for i in prompt)
        return _marked(_seed(request), ids, 4)
    return Prompt(len(str(prompt)) // CHARS_PER_TOKEN if prompt else 0)


def shared_tokens(prompt: Prompt, known: Mapping[int, Any]) -> int:
    """Estimated tokens of the longest prefix whose name is known. O(marks)."""
    return max((mark.tokens for mark in prompt.marks if mark.name in known), default=0)


def _seed(request: object) -> bytes:
    """What parts prompts of equal text: the model or adapter, the salt, and tools, which chat
    templates put in front."""
    apart = [getattr(request, name, None) for name in ("model", "cache_salt", "tools")]
    return _plain(apart).encode()


def _said(messages: Sequence[Any]) -> Iterator[str]:
    for message in messages:
        as_dict = message if isinstance(message, Mapping) else getattr(message, "__dict__", {})
        content = as_dict.get("content")
        # Separators that no text has keep ("a", "bc") apart from ("ab", "c").
        yield f"\x1e{as_dict.get('role', '')}\x1f"
        yield content if isinstance(content, str) else _plain(content)
        if as_dict.get("tool_calls"):
            yield _plain(as_dict["tool_calls"])


def _plain(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=_fields)


def _fields(value: object) -> object:
    if isinstance(value, Sequence | Iterator):
        return list(value)
    return getattr(value, "__dict__", None) or str(value)


def _marked(seed: bytes, data: bytes, bytes_per_token: int) -> Prompt:
    state = xxhash.xxh3_64(len(seed).to_bytes(8, "little") + seed)
    marks = []
    for start, end in pairwise(_ends(len(data), MARK_TOKENS * bytes_per_token)):
        state.update(data[start:end])
        marks.append(Mark(state.intdigest(), end // bytes_per_token))
    return Prompt(len(data) // bytes_per_token, tuple(marks))


def _ends(length: int, step: int) -> Iterator[int]:
    end, count = 0, 0
    while end <= length:
        yield end
        count += 1
        end += step if count <= EVEN_MARKS else end
