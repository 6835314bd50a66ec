"""The shapes that generated workloads have: lengths in tokens, times in seconds.

Fitted to public traces: `CHAT` to the conversation trace and `RAG` to the synthetic trace of
Mooncake (kvcache-ai/Mooncake, FAST25-release), `AGENT` to the 355 Claude Code sessions of
kv-cache-tester (callanjfox/kv-cache-tester). Percentiles were measured there; nothing of the traces
themselves is in here.
"""

import math
from dataclasses import dataclass
from random import Random

Z90 = 1.2815515655446004


@dataclass(frozen=True, slots=True)
class Spread:
    """A log-normal on each side of the median: p10, p50 and p90 are exactly these."""

    p10: float
    p50: float
    p90: float
    least: float = 1.0
    most: float = math.inf

    def draw(self, rng: Random) -> float:
        """One value in `least..most`."""
        z = rng.gauss(0.0, 1.0)
        side = self.p90 / self.p50 if z > 0 else self.p50 / self.p10
        value = self.p50 * math.exp(z * math.log(side) / Z90)
        return min(self.most, max(self.least, value))

    def whole(self, rng: Random) -> int:
        """One value as a whole number of at least 1."""
        return max(1, round(self.draw(rng)))


@dataclass(frozen=True, slots=True)
class Chat:
    """People who talk to an assistant: three of four ask once."""

    per_s: float = 2.5  # sessions a second
    prompts: int = 1  # all share one system prompt of a block
    prompt_tokens: int = 600
    again: float = 0.27  # chance of a second turn
    and_again: float = 0.47  # chance of each further one
    first: Spread = Spread(908, 5_600, 25_000, most=120_000)
    message: Spread = Spread(9, 40, 600)
    document: float = 0.15  # chance that a message carries one
    document_tokens: Spread = Spread(1_500, 4_500, 16_000, most=100_000)
    output: Spread = Spread(24, 350, 597, most=4_000)
    think_s: Spread = Spread(39, 123, 474)


@dataclass(frozen=True, slots=True)
class Agent:
    """A model that calls tools: long contexts that grow by little, compacted when they are full."""

    per_s: float = 355 / 43_200  # sessions a second
    prompts: int = 24  # tools and instructions that are shared at any moment
    fresh_prompt: float = 0.5  # chance that a session brings a set of its own, which others take up
    prompt_tokens: Spread = Spread(11_988, 14_949, 15_930, most=30_000)
    requests: Spread = Spread(6, 43, 151, most=400)
    first: Spread = Spread(16_000, 27_000, 260_000, most=700_000)  # many sessions are resumed
    tool_growth: Spread = Spread(197, 687, 3_530, most=40_000)
    turn_growth: Spread = Spread(149, 548, 1_833, most=40_000)
    output: Spread = Spread(107, 221, 894, most=16_000)
    api_s: Spread = Spread(3.5, 6.4, 18.6, most=120)
    end_turn: float = 0.057  # share of requests that end a turn
    tool_think_s: Spread = Spread(4.0, 9.0, 71.0)
    turn_think_s: Spread = Spread(9.0, 210.0, 2_977.0, most=200_000)
    limit: Spread = Spread(140_000, 160_000, 400_000, least=60_000)  # tokens that fit the model
    summary: Spread = Spread(20_000, 40_000, 90_000)  # tokens after a compaction
    rewrite_tool: float = 0.005  # chance that the context is rewritten behind the prompt
    rewrite_turn: float = 0.08
    rewrite_again: float = 0.12  # and at the next request once more
    sub_agents: float = 0.0024  # chance that a request starts some
    sub_first: Spread = Spread(9_064, 10_072, 11_741)
    sub_requests: Spread = Spread(5, 10, 17, most=40)
    sub_growth: Spread = Spread(500, 2_500, 10_000, most=30_000)


@dataclass(frozen=True, slots=True)
class Rag:
    """Questions about documents: most documents are asked about once, some again and again."""

    per_s: float = 3.2  # sessions a second
    prompts: int = 4
    prompt_tokens: int = 1_100
    documents: Spread = Spread(2_500, 12_000, 30_000, most=100_000)
    popular: float = 0.16  # chance that a session takes up documents of another one
    pool: int = 96  # sets of documents that can be taken up
    again: float = 0.36  # chance of a second question
    and_again: float = 0.74
    question: Spread = Spread(15, 60, 400)
    output: Spread = Spread(4, 69, 389, most=2_000)
    think_s: Spread = Spread(15, 62, 320)


CHAT, AGENT, RAG = Chat(), Agent(), Rag()

MIX = {"chat": 0.70, "agent": 0.02, "rag": 0.28}
"""Shares of the sessions of `mix`; agents have fifty times the blocks."""

MIX_PER_S = 0.41
"""Sessions a second: agents arrive as often as in their own workload."""
