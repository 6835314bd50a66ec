"""What load-or-recompute decided so far, and how well it foretold reading. For `status`."""

from dataclasses import dataclass

from tiered_kv.policies.load_or_recompute import Decision


@dataclass
class Decisions:
    """Sums since the start; `_s` are seconds. `loaded` and `recomputed` are blocks of hits.

    `modelled_s` is what was chosen, until the last token of each prompt is computed,
    `recompute_all_s` what loading nothing would have taken. Of the fetches that read something
    and brought all, `read_modelled_s` was foretold and `read_s` was measured.
    """

    made: int = 0
    loaded: int = 0
    recomputed: int = 0
    samples: int = 0
    modelled_s: float = 0.0
    recompute_all_s: float = 0.0
    reads: int = 0
    read_modelled_s: float = 0.0
    read_s: float = 0.0

    def note(self, decision: Decision) -> None:
        """One more decision."""
        self.made += 1
        self.loaded += decision.load
        self.recomputed += decision.recompute
        self.modelled_s += decision.seconds
        self.recompute_all_s += decision.recompute_all_s

    def measured(self, modelled_s: float, seconds: float) -> None:
        """A fetch that read something has brought all of it."""
        self.reads += 1
        self.read_modelled_s += modelled_s
        self.read_s += seconds
