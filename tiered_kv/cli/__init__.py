"""The command line: `tiered-kv`, or `python -m tiered_kv`.

Commands import torch, Ray and the service itself when they run, so that `--help` answers at once.
"""

from tiered_kv.cli.root import main

__all__ = ["main"]
