"""The GPUs of one node as one engine: a roofline for prefill and decode, batched continuously.

Prefill is bound by FLOPs, a decode step by the bytes of weights and KV that it reads. With
sequences in both phases the engine mixes them, as with chunked prefill: a step decodes one token
of each running sequence and prefills a chunk.
"""

import heapq
from dataclasses import dataclass

from tiered_kv.policies.load_or_recompute import Prefill
from tiered_kv.sim.clock import Clock, Signal
from tiered_kv.sim.models import ModelSpec

CHUNK_TOKENS = 2048
"""Tokens of prefill in a mixed step: the default of vLLM's `max_num_batched_tokens` where
prefill is chunked."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What the GPUs of a node do together: `flops` and `bytes_per_s` as in their datasheet, and
    the shares of these (`mfu` in prefill, `mbu` in decode) that engines reach."""

    model: ModelSpec
    flops: float
    bytes_per_s: float
    mfu: float
    mbu: float

    @property
    def prefill(self) -> Prefill:
        """Of one sequence alone on the GPUs."""
        return self.model.prefill(self.flops * self.mfu)

    def prefill_s(self, new: float, before: float = 0.0) -> float:
        """Seconds to prefill `new` tokens behind `before` others, alone on the GPUs."""
        return self.prefill.seconds(before, before + new)

    def step_s(self, batch: float, context_tokens: float) -> float:
        """Seconds of one decode step of a batch whose contexts add up to so many tokens."""
        kv = context_tokens * self.model.kv_bytes
        read_s = (self.model.weights_read(batch) + kv) / (self.bytes_per_s * self.mbu)
        return max(read_s, 2 * self.model.active * batch / (self.flops * self.mfu))


@dataclass(slots=True)
class _Prefill:
    left_s: float
    ended: Signal


class Gpu:
    """Prefills first come, first served; decodes all together. O(log batch) an event."""

    def __init__(self, clock: Clock, rates: Rates) -> None:
        self._clock = clock
        self.rates = rates
        self._chunk_s = rates.prefill_s(CHUNK_TOKENS)
        self._prefills: list[_Prefill] = []
        self._decodes: list[tuple[float, int, int, Signal]] = []  # target, number, context, ended
        self._context = 0
        self._steps = 0.0
        self._since = 0.0
        self._version = 0
        self._number = 0
        self.busy_s = 0.0
        self.prefill_busy_s = 0.0

    def prefill(self, new: int, before: int) -> Signal:
        """Prefill `new` tokens behind `before` others; fires when it has ended."""
        self._advance()
        ended = self._clock.signal()
        self._prefills.append(_Prefill(self.rates.prefill_s(new, before), ended))
        self._plan()
        return ended

    def decode(self, tokens: int, context: int) -> Signal:
        """Generate `tokens` for a sequence of `context` tokens; fires when the last is out."""
        self._advance()
        self._number += 1
        ended = self._clock.signal()
        length = context + tokens // 2  # on average over its life
        heapq.heappush(self._decodes, (self._steps + tokens, self._number, length, ended))
        self._context += length
        self._plan()
        return ended

    def step_s(self) -> float:
        """Seconds until the next token of the running batch."""
        decode_s, chunk_s = self._times()
        return decode_s + chunk_s

    def outlook(self) -> Prefill:
        """What a prefill would take from now on: behind those that are queued, and sharing each
        step with the running batch."""
        alone, queued_s = self.rates.prefill, sum(one.left_s for one in self._prefills)
        batch = len(self._decodes)
        decode_s = self.rates.step_s(batch, self._context) if batch else 0.0
        slower = 1 + decode_s / self._chunk_s
        return Prefill(alone.linear_s * slower, alone.quadratic_s * slower, queued_s * slower)

    def stop(self) -> None:
        """Lose everything that runs; whoever waits goes on."""
        self._advance()
        for one in self._prefills:
            one.ended.fire()
        for _, _, _, ended in self._decodes:
            ended.fire()
        self._prefills, self._decodes, self._context = [], [], 0
        self._plan()

    def _times(self) -> tuple[float, float]:
        """Seconds of the decode part and of the prefill part of a step."""
        batch = len(self._decodes)
        decode_s = self.rates.step_s(batch, self._context) if batch else 0.0
        return decode_s, self._chunk_s if self._prefills else 0.0

    def _advance(self) -> None:
        passed = self._clock.now - self._since
        self._since = self._clock.now
        decode_s, chunk_s = self._times()
        step_s = decode_s + chunk_s
        if passed <= 0 or step_s <= 0:
            return
        self.busy_s += passed
        self.prefill_busy_s += passed * chunk_s / step_s
        if self._decodes:
            self._steps += passed / step_s
        if self._prefills:
            self._prefills[0].left_s -= passed * chunk_s / step_s

    def _plan(self) -> None:
        """Foresee the next end of anything."""
        self._version += 1
        decode_s, chunk_s = self._times()
        step_s = decode_s + chunk_s
        ends = []
        if self._decodes:
            ends.append((self._decodes[0][0] - self._steps) * step_s)
        if self._prefills:
            ends.append(self._prefills[0].left_s * step_s / chunk_s)
        if ends:
            version = self._version
            self._clock.after(max(0.0, min(ends)), lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        while self._decodes and self._decodes[0][0] <= self._steps + 1e-6:
            _, _, length, ended = heapq.heappop(self._decodes)
            self._context -= length
            ended.fire()
        if self._prefills and self._prefills[0].left_s <= 1e-9:
            self._prefills.pop(0).ended.fire()
        self._plan()
