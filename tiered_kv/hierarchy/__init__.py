"""Which block is where, what is reserved, leased and moving, and what should move next.

Pure: no I/O, no clock, no logging. `core.Hierarchy` is what everybody else talks to.
"""

from tiered_kv.hierarchy.core import Hierarchy
from tiered_kv.hierarchy.state import TierSpec
from tiered_kv.hierarchy.verify import check

__all__ = ["Hierarchy", "TierSpec", "check"]
