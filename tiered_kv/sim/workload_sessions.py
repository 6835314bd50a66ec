"""Sessions of the generated workloads, each an iterator over its requests in order of time.

Ids name 512-token blocks as in the Mooncake format: equal ids mean an equal whole prefix. The last
block of a request is incomplete and therefore new each time.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random

from tiered_kv.sim.workload_shapes import AGENT, CHAT, RAG, Agent

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `after` is why the session's last one ended (empty for its first), `think_s`
    how long the session was quiet since then."""

    at_s: float
    session: int
    kind: str
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    after: str = ""
    think_s: float = 0.0


@dataclass(slots=True)
class Prompt:
    """A beginning that sessions share: its complete blocks."""

    ids: tuple[int, ...]


class Shared:
    """The prompts, or sets of documents, that are shared at the moment. Bounded."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._prompts: list[Prompt] = []

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, prompt: Prompt, rng: Random) -> None:
        """A new one; when there are too many, a random one makes room."""
        if len(self._prompts) >= self._limit:
            self._prompts[rng.randrange(self._limit)] = prompt
        else:
            self._prompts.append(prompt)

    def pick(self, rng: Random) -> Prompt:
        """One of them, the earlier the likelier (about Zipf)."""
        n = len(self._prompts)
        return self._prompts[int(n ** rng.random()) - 1] if n > 1 else self._prompts[0]


@dataclass(slots=True)
class World:
    """What sessions of one workload share: block ids, prompts, documents."""

    ids: Iterator[int] = field(default_factory=lambda: count(0))
    sessions: Iterator[int] = field(default_factory=lambda: count(0))
    chat: Shared = field(default_factory=lambda: Shared(CHAT.prompts))
    agent: Shared = field(default_factory=lambda: Shared(AGENT.prompts))
    sub: Shared = field(default_factory=lambda: Shared(4))
    rag: Shared = field(default_factory=lambda: Shared(RAG.prompts))
    documents: Shared = field(default_factory=lambda: Shared(RAG.pool))

    def prompt(self, tokens: int, before: Prompt | None = None) -> Prompt:
        """A new shared beginning of so many tokens, behind another one."""
        head = before.ids if before else ()
        total = tokens // BLOCK_TOKENS
        return Prompt(head + tuple(next(self.ids) for _ in range(total - len(head))))

    def fill(self, shared: Shared, n: int, tokens: int, rng: Random) -> Prompt:
        """One of `n` prompts, which are made on the way."""
        while len(shared) < n:
            shared.add(self.prompt(tokens), rng)
        return shared.pick(rng)


class Context:
    """What a session's next request begins with. O(blocks of the context)."""

    def __init__(self, world: World, prompt: Prompt, tokens: int) -> None:
        self._world = world
        self._prompt = prompt
        self._ids = list(prompt.ids)
        self.tokens = max(tokens, len(prompt.ids) * BLOCK_TOKENS)

    def run(self) -> tuple[int, ...]:
        """Ids of all blocks, the incomplete one at the end included."""
        ids, fresh = self._ids, self._world.ids
        whole = self.tokens // BLOCK_TOKENS
        ids += [next(fresh) for _ in range(whole - len(ids))]
        tail = (next(fresh),) if self.tokens % BLOCK_TOKENS else ()
        return (*ids, *tail)

    def rewrite(self, tokens: int) -> None:
        """Nothing but the prompt is as before, and so many tokens are there now."""
        self._ids = list(self._prompt.ids)
        self.tokens = max(tokens, len(self._ids) * BLOCK_TOKENS)


def chat(world: World, rng: Random, at_s: float) -> Iterator[Request]:
    """A conversation: each turn begins with all that was said before."""
    shape, sid = CHAT, next(world.sessions)
    context = Context(
        world, world.fill(world.chat, shape.prompts, shape.prompt_tokens, rng),
        shape.prompt_tokens + shape.first.whole(rng),
    )  # fmt: skip
    chance, after, think_s = shape.again, "", 0.0
    while True:
        output = shape.output.whole(rng)
        yield Request(at_s, sid, "chat", context.tokens, output, context.run(), after, think_s)
        if rng.random() >= chance:
            return
        chance, after = shape.and_again, "end_turn"
        think_s = shape.think_s.draw(rng)
        at_s += think_s
        more = shape.document_tokens if rng.random() < shape.document else shape.message
        context.tokens += output + more.whole(rng)


def rag(world: World, rng: Random, at_s: float) -> Iterator[Request]:
    """Questions about a set of documents, which several sessions may share."""
    shape, sid = RAG, next(world.sessions)
    if len(world.documents) and rng.random() < shape.popular:
        documents = world.documents.pick(rng)
    else:
        prompt = world.fill(world.rag, shape.prompts, shape.prompt_tokens, rng)
        documents = world.prompt(shape.prompt_tokens + shape.documents.whole(rng), prompt)
        world.documents.add(documents, rng)
    chance, after, think_s = shape.again, "", 0.0
    while True:
        known = len(documents.ids) * BLOCK_TOKENS
        context = Context(world, documents, known + shape.question.whole(rng))
        output = shape.output.whole(rng)
        yield Request(at_s, sid, "rag", context.tokens, output, context.run(), after, think_s)
        if rng.random() >= chance:
            return
        chance, after = shape.and_again, "end_turn"
        think_s = shape.think_s.draw(rng)
        at_s += think_s


def agent(world: World, rng: Random, at_s: float) -> Iterator[Request]:
    """A tool loop with turns, compactions and, now and then, sub-agents that it waits for."""
    shape, sid = AGENT, next(world.sessions)
    if not len(world.agent) or rng.random() < shape.fresh_prompt:
        world.agent.add(world.prompt(shape.prompt_tokens.whole(rng)), rng)
    context = Context(world, world.agent.pick(rng), shape.first.whole(rng))
    limit = max(shape.limit.draw(rng), context.tokens * 1.1)
    after, think_s, rewritten = "", 0.0, False
    for _ in range(shape.requests.whole(rng)):
        output = shape.output.whole(rng)
        yield Request(at_s, sid, "agent", context.tokens, output, context.run(), after, think_s)
        at_s += shape.api_s.draw(rng)
        ends = rng.random() < shape.end_turn
        if not ends and rng.random() < shape.sub_agents:
            for request in _sub_agents(world, rng, at_s):
                yield request
                at_s = max(at_s, request.at_s + shape.api_s.p50)
        after = "end_turn" if ends else "tool_use"
        think_s = (shape.turn_think_s if ends else shape.tool_think_s).draw(rng)
        at_s += think_s
        context.tokens += (shape.turn_growth if ends else shape.tool_growth).whole(rng)
        chance = shape.rewrite_turn if ends else shape.rewrite_tool
        rewritten = _compact(context, limit, shape.rewrite_again if rewritten else chance, rng)


def _compact(context: Context, limit: float, chance: float, rng: Random) -> bool:
    """Cut a context that has grown too long down to a summary, or rewrite it; whether it was."""
    if context.tokens > limit:
        context.rewrite(min(int(limit), AGENT.summary.whole(rng)))
    elif rng.random() < chance:
        context.rewrite(context.tokens)
    else:
        return False
    return True


def _sub_agents(world: World, rng: Random, at_s: float) -> Iterator[Request]:
    """One to three of them at once, merged by time."""
    some = [_sub_agent(world, rng, at_s, AGENT) for _ in range(rng.randint(1, 3))]
    return heapq.merge(*some, key=lambda request: request.at_s)


def _sub_agent(world: World, rng: Random, at_s: float, shape: Agent) -> Iterator[Request]:
    sid = next(world.sessions)
    prompt = world.fill(world.sub, 4, int(shape.sub_first.p10) - 600, rng)
    context = Context(world, prompt, shape.sub_first.whole(rng))
    after, think_s = "", 0.0
    for _ in range(shape.sub_requests.whole(rng)):
        output = shape.output.whole(rng)
        yield Request(at_s, sid, "agent", context.tokens, output, context.run(), after, think_s)
        after, think_s = "tool_use", shape.tool_think_s.draw(rng)
        at_s += shape.api_s.draw(rng) + think_s
        context.tokens += shape.sub_growth.whole(rng)
