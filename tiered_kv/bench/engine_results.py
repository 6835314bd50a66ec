"""What `bench engine` concludes from its samples: names, medians, bars. Pure."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from tiered_kv.bench.engine_contenders import CPU_TIER, DRAM, FS, LMCACHE, NVME, OURS, RECOMPUTE
from tiered_kv.bench.report import Result, compared

HIT_SHARE = 0.9
"""A wake counts as one when this share of the prompt came from a cache."""
AGAINST_RECOMPUTE = {(4096, NVME): 10.0}
AGAINST_PEERS = {(4096, DRAM, CPU_TIER): 0.9, (4096, DRAM, LMCACHE): 4.0, (4096, NVME, FS): 1.0}
ZERO_HIT_BAR = 0.97

Key = tuple[str, int, str]
"""Contender, tokens of the prompt, tier; tier is empty for those who compute."""


class Sample(NamedTuple):
    """One time to the first token. `cached` tokens of the prompt were not computed."""

    seconds: float
    cached: int
    answer: tuple[int, ...]


class Samples:
    """All samples by contender, prompt length and tier, one a round."""

    def __init__(self) -> None:
        self._rounds: dict[Key, list[Sample]] = defaultdict(list)

    def add(self, name: str, tokens: int, tier: str, sample: Sample) -> None:
        """Note the sample of the next round."""
        self._rounds[name, tokens, tier].append(sample)

    def of(self, name: str, tokens: int, tier: str) -> list[Sample]:
        """One a round, empty when it did not take part."""
        return self._rounds.get((name, tokens, tier), [])

    def names(self, tokens: int, tier: str) -> list[str]:
        """Who was measured there."""
        return [name for name, n, t in self._rounds if (n, t) == (tokens, tier)]

    def different(self) -> int:
        """Samples whose answer is not that of the engine that computed everything."""
        return sum(
            sample.answer != right.answer
            for (name, tokens, _), samples in self._rounds.items()
            if name != RECOMPUTE
            for sample in samples
            for right in self.of(RECOMPUTE, tokens, "")[:1]
        )


def missed(samples: Sequence[Sample], tokens: int) -> int:
    """How many of them computed more than a tenth of the prompt."""
    return sum(sample.cached < HIT_SHARE * tokens for sample in samples)


def ttft(samples: Samples, sizes: Sequence[int], tiers: Sequence[str]) -> list[Result]:
    """`engine/ttft/<tokens>/<tier>` against recompute, and the same `/vs-<peer>`.

    Ratios are medians over the rounds: both samples of a round met the same machine. Our misses
    count as the slow wakes they are. A peer with a miss in more than a third of its rounds is left
    out, and a missed round of a peer too: that is no time of its cache.
    """
    results: list[Result] = []
    for tokens in sizes:
        anew = samples.of(RECOMPUTE, tokens, "")
        for tier in tiers:
            mine = samples.of(OURS, tokens, tier)
            if not mine or not anew:
                continue
            name = f"engine/ttft/{tokens}/{tier}"
            bar = AGAINST_RECOMPUTE.get((tokens, tier))
            results.append(_faster(name, mine, RECOMPUTE, anew, bar))
            for peer in samples.names(tokens, tier):
                theirs = samples.of(peer, tokens, tier)
                if peer == OURS or left_out(theirs, tokens):
                    continue
                pairs = [
                    (our, their) for our, their in zip(mine, theirs, strict=False)
                    if not missed([their], tokens)
                ]  # fmt: skip
                bar = AGAINST_PEERS.get((tokens, tier, peer))
                results.append(_faster(f"{name}/vs-{peer}", *_split(pairs, peer), bar))
    return results


def left_out(theirs: Sequence[Sample], tokens: int) -> bool:
    """Whether a peer missed too often to be compared with."""
    return missed(theirs, tokens) * 3 > len(theirs)


def zero_hit(tokens: int, ours: Sequence[float], bare: Sequence[float]) -> list[Result]:
    """`engine/zero-hit-throughput` in tokens a second, from seconds of paired passes of `tokens`
    tokens each, prompts and answers together; empty without passes."""
    if not ours or not bare:
        return []
    ratio = statistics.median(b / a for a, b in zip(ours, bare, strict=True))
    return [
        compared(
            "engine/zero-hit-throughput", tokens / statistics.median(ours), "tokens/s", RECOMPUTE,
            tokens / statistics.median(bare), ratio=ratio, bar=ZERO_HIT_BAR,
        )
    ]  # fmt: skip


def _split(
    pairs: Sequence[tuple[Sample, Sample]], peer: str
) -> tuple[list[Sample], str, list[Sample]]:
    return [our for our, _ in pairs], peer, [their for _, their in pairs]


def _faster(
    name: str, mine: Sequence[Sample], against: str, theirs: Sequence[Sample], bar: float | None
) -> Result:
    ratio = statistics.median(t.seconds / m.seconds for m, t in zip(mine, theirs, strict=True))
    our = statistics.median(sample.seconds for sample in mine)
    their = statistics.median(sample.seconds for sample in theirs)
    return compared(name, our, "s", against, their, ratio=ratio, bar=bar)
