"""A workload in a few numbers."""

import math
import random
from dataclasses import dataclass, replace

from tiered_kv.errors import BadInput

Z90 = 1.2815515594
"""The 90th percentile of a standard normal distribution."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions that take turns for ever: a prompt, an answer, a pause. Tokens and seconds.

    A session grows from `start_tokens` until `end_tokens` and is then replaced by a fresh one;
    at the beginning all ages occur alike. A pause is a tool's run (`tool_share` of them) or a
    person's; both are lognormal with these medians and 90th percentiles (Claude Code trace:
    9 and 71 s after tool calls, 210 and 2,977 s after the end of a turn).
    """

    sessions: int
    start_tokens: int = 8192
    end_tokens: int = 32768
    prompt_tokens: int = 256
    output_tokens: int = 256
    tool_share: float = 0.9
    tool_p50_s: float = 9.0
    tool_p90_s: float = 71.0
    turn_p50_s: float = 210.0
    turn_p90_s: float = 2977.0

    def __post_init__(self) -> None:
        for name in ("sessions", "start_tokens", "end_tokens", "prompt_tokens", "output_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise BadInput(f"workload: {name} = {value!r} must be a positive whole number")
        if self.end_tokens < self.start_tokens + self.prompt_tokens + self.output_tokens:
            raise BadInput(
                f"workload: end_tokens = {self.end_tokens} leaves no room for a turn of "
                f"{self.prompt_tokens} + {self.output_tokens} tokens behind start_tokens = "
                f"{self.start_tokens}"
            )
        if not 0 <= self.tool_share <= 1:
            raise BadInput(f"workload: tool_share = {self.tool_share!r} must be from 0 to 1")
        for kind in ("tool", "turn"):
            p50, p90 = getattr(self, f"{kind}_p50_s"), getattr(self, f"{kind}_p90_s")
            if not 0 < p50 <= p90 < math.inf:
                raise BadInput(f"workload: {kind}_p50_s = {p50!r} and {kind}_p90_s = {p90!r} "
                               "must be positive and in this order")  # fmt: skip

    def pause_s(self, rng: random.Random) -> float:
        """A pause."""
        tool = rng.random() < self.tool_share
        p50, p90 = (
            (self.tool_p50_s, self.tool_p90_s) if tool else (self.turn_p50_s, self.turn_p90_s)
        )
        return p50 * math.exp(rng.gauss(0.0, 1.0) * math.log(p90 / p50) / Z90)

    def slower(self, times: float) -> "Workload":
        """The same with pauses that are so much longer."""
        names = ("tool_p50_s", "tool_p90_s", "turn_p50_s", "turn_p90_s")
        return replace(self, **{name: getattr(self, name) * times for name in names})
