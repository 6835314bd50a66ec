"""Where requests come from: sessions that take turns for ever, or a trace."""

import math
import random
import struct
from collections.abc import Iterable
from functools import partial

from tiered_kv.errors import BadInput
from tiered_kv.sim.clock import Process
from tiered_kv.sim.description import Workload
from tiered_kv.sim.serving import Ask, Server
from tiered_kv.sim.workload_sessions import Request
from tiered_kv.types import BlockKey, SessionId

GOLDEN = (math.sqrt(5) - 1) / 2
"""Steps of it, modulo 1, fill an interval evenly from the first few on."""
TRACE_BLOCK_TOKENS = 512
"""Tokens that an id of a trace stands for."""


class Chats:
    """The sessions of a workload, each a process."""

    def __init__(self, server: Server, workload: Workload, seed: int, arrive_s: float) -> None:
        self.server = server
        self.workload = workload
        self.open: dict[int, SessionId] = {}
        bt = server.setup.block_tokens
        pool = server.machine.pool_blocks
        if -(-workload.end_tokens // bt) > pool:
            raise BadInput(f"a session of {workload.end_tokens} tokens exceeds the {pool * bt} "
                           "that HBM holds beside the weights")  # fmt: skip
        offset = random.Random(f"ages/{seed}").random()
        for n in range(workload.sessions):
            rng = random.Random(f"{seed}/{n}")  # the same in every configuration
            age = (offset + n * GOLDEN) % 1.0
            begin = arrive_s * n / workload.sessions
            server.clock.at(begin, partial(self._begin, n, age, rng))

    def _begin(self, number: int, age: float, rng: random.Random) -> None:
        self.server.clock.spawn(self._live(number, age, rng))

    def _live(self, number: int, age: float, rng: random.Random) -> Process:
        work = self.workload
        turn = work.prompt_tokens + work.output_tokens
        tokens = work.start_tokens + int(age * (work.end_tokens - work.start_tokens - turn))
        life = 0
        while True:
            sid = SessionId(f"{number}.{life}")
            self.open[number] = sid
            known, turns = 0, 0
            run: tuple[BlockKey, ...] = ()
            while tokens + turn <= work.end_tokens:
                prompt = tokens + work.prompt_tokens
                tokens = prompt + work.output_tokens
                turns += 1
                after, tail = self._keys(number, life, tokens, turns)
                yield from self.server.serve(
                    Ask(sid, run, known, prompt, work.output_tokens, after, tail)
                )
                run, known = after, tokens
                yield work.pause_s(rng)
            self.server.close(sid)
            life += 1
            tokens = work.start_tokens

    def _keys(self, *of: int) -> tuple[tuple[BlockKey, ...], bool]:
        number, life, tokens, turn = of
        whole, rest = divmod(tokens, self.server.setup.block_tokens)
        keys = [BlockKey(struct.pack("<4I", number, life, i, 0)) for i in range(whole)]
        if rest:  # the incomplete block of a turn is another one than that of the next turn
            keys.append(BlockKey(struct.pack("<4I", number, life, whole, turn)))
        return tuple(keys), bool(rest)


class Trace:
    """Requests at the times of a trace, whether or not the server keeps up."""

    def __init__(self, server: Server, requests: Iterable[Request]) -> None:
        if server.setup.block_tokens != TRACE_BLOCK_TOKENS:
            raise BadInput(f"block_tokens = {server.setup.block_tokens} must be "
                           f"{TRACE_BLOCK_TOKENS}, as in the trace")  # fmt: skip
        self.open: dict[int, SessionId] = {}
        self._server = server
        server.clock.spawn(self._play(requests))

    def _play(self, requests: Iterable[Request]) -> Process:
        clock = self._server.clock
        for request in requests:
            if request.at_s > clock.now:
                yield request.at_s - clock.now
            run = tuple(BlockKey(struct.pack("<QQ", i, 0)) for i in dict.fromkeys(request.hash_ids))
            prompt = max(1, request.input_length)
            ask = Ask(None, run, prompt, prompt, max(1, request.output_length), run)
            clock.spawn(self._server.serve(ask))
