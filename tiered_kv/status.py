"""What an operator sees of a node, as plain values ready for JSON."""

import os
import time
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import psutil

from tiered_kv.sessions import State
from tiered_kv.types import Held

if TYPE_CHECKING:
    from tiered_kv.node import Node


def node(node: "Node") -> dict[str, Any]:
    """Tiers, sessions, moves, misses by reason, errors and this process. O(sessions)."""
    parts, now = node.parts, time.time()
    counts = Counter(node.hierarchy.book.counts)
    counts.update(node.counts)
    states = Counter(node.keeper.table.state(s, now) for s in node.keeper.table)
    return {
        "node_id": parts.node_id,
        "incarnation": parts.incarnation,
        "up_s": round(now - node.started_s, 1),
        "pool": parts.pool.describe(),
        "notes": list(parts.notes),
        "tiers": [
            asdict(usage) | {"leaked_slots": node.hierarchy.leaked_slots(usage.medium)}
            for usage in node.hierarchy.usage()
        ],
        "offline": {str(m): why for m, why in node.health.offline().items()},
        "layouts": [layout.describe() for layout in node.layouts.values()],
        "sessions": {str(state): states.get(state, 0) for state in State},
        "pending": node.hierarchy.pending | {"queued": node.mover.queued},
        "moves": [
            {"from": str(source), "to": str(target), **asdict(leg)}
            for (source, target), leg in node.mover.legs.items()
        ],
        "decisions": asdict(node.decisions),
        "rates": {str(m): round(pace.bytes_per_s) for m, pace in node.mover.paces.items()},
        "prefetch": {"policy": node.outlooks.policy.name} | asdict(node.outlooks.wasted()),
        "recording": {
            "file": node.recording.path,
            "on": node.recording.on,
            "requests": node.recording.requests,
            "left_out": node.recording.left_out,
        },
        "hits": counts.pop("hit", 0),
        "misses": {k[5:]: n for k, n in sorted(counts.items()) if k.startswith("miss.")},
        "counts": {k: n for k, n in sorted(counts.items()) if not k.startswith("miss.")},
        "errors": list(node.health.errors),
        "process": process(),
    }


def sessions(node: "Node") -> list[dict[str, Any]]:
    """One row a session, the longest unused first. O(blocks of all sessions)."""
    now = time.time()
    rows = []
    for session in sorted(node.keeper.table, key=lambda s: s.used_s):
        tiers: Counter[str] = Counter()
        for answer in node.hierarchy.lookup(session.run):
            tiers[str(answer.tiers[0]) if isinstance(answer, Held) else "absent"] += 1
        rows.append(
            {
                "id": session.id,
                "state": str(node.keeper.table.state(session, now)),
                "tokens": session.n_tokens,
                "blocks": len(session.run),
                "tiers": dict(tiers),
                "unused_s": round(now - session.used_s, 1),
            }
        )
    return rows


def process() -> dict[str, Any]:
    """Memory, descriptors and threads of this process, for leak hunting."""
    me = psutil.Process()
    memory = me.memory_info()
    return {
        "pid": os.getpid(),
        "rss_bytes": memory.rss,
        "private_bytes": memory.rss - memory.shared,
        "fds": me.num_fds(),
        "threads": me.num_threads(),
        "cpu_s": round(sum(me.cpu_times()[:2]), 2),
    }
