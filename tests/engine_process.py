"""An engine in a process of its own: commands on stdin, one line of answer each on stdout."""

import sys
from typing import Any

from cluster_kit import LAYOUT, NBYTES, SECRET, Engine, content, tokens_of, view_of
from socket_link import SocketLink

from tiered_kv import keys
from tiered_kv.checksum import checksum
from tiered_kv.sessions import Session, SessionId

SCRIPT = f"""
import sys
sys.path.insert(0, {__file__.rpartition("/")[0]!r})
import engine_process
engine_process.main(sys.argv[1])
"""


def main(path: str) -> None:
    engine = Engine(SocketLink(path))
    engine.attach()
    say("attached", engine.owner)
    for line in sys.stdin:
        command, *args = line.split()
        COMMANDS[command](engine, *args)


def say(*words: object) -> None:
    print(*words, flush=True)


def go() -> None:
    assert sys.stdin.readline().strip() == "go"


def save(engine: Engine, name: str, blocks: str) -> None:
    """Save as every engine does; how many blocks."""
    say(getattr(engine.save(name, int(blocks)), "blocks", "refused"))


def wake(engine: Engine, name: str) -> None:
    """Wake and compare; how many blocks came and did not."""
    got = engine.wake(name)
    say(got.blocks, got.missed)


def reserve(engine: Engine, name: str, blocks: str) -> Any:
    """Reserve and keep; the slots."""
    run = keys.chain(LAYOUT, SECRET, tokens_of(name, int(blocks))).keys
    held = engine.call("reserve", LAYOUT.fingerprint, run, engine.owner)
    say(*held.slots)
    return held


def slow_save(engine: Engine, name: str, blocks: str) -> None:
    """Fill half of each slot, wait for `go`, fill the other halves, commit; how many blocks."""
    held = reserve(engine, name, blocks)
    half = NBYTES // 2
    for key, slot in zip(held.keys, held.slots, strict=True):
        view_of(engine.pool, slot)[:half] = content(key)[:half]
    say("half")
    go()
    for key, slot in zip(held.keys, held.slots, strict=True):
        view_of(engine.pool, slot)[half:] = content(key)[half:]
    sums = [checksum(content(key)) for key in held.keys]
    n = int(blocks)
    run = tuple(keys.chain(LAYOUT, SECRET, tokens_of(name, n)).keys)
    record = Session(SessionId(name), LAYOUT.fingerprint, run, n * LAYOUT.block_tokens, False, 0.0)
    say(engine.call("commit", held.id, sums, session=record).blocks)


def slow_wake(engine: Engine, name: str, ttl_s: str) -> None:
    """Copy half of each slot, wait for `go`, copy the other halves, compare generations. Answers
    `intact` or `lapsed`, and whether the bytes would have been right."""
    got = engine.call("wake", name, LAYOUT.fingerprint, float(ttl_s))
    half = NBYTES // 2
    copies = [bytearray(NBYTES) for _ in got.lease.slots]
    for copy, slot in zip(copies, got.lease.slots, strict=True):
        copy[:half] = view_of(engine.pool, slot)[:half]
    say("half", *got.lease.slots)
    go()
    for copy, slot in zip(copies, got.lease.slots, strict=True):
        copy[half:] = view_of(engine.pool, slot)[half:]
    assert engine.pool is not None
    intact = engine.pool.generations.unchanged(got.lease.slots, got.lease.generations)
    right = [bytes(c) == content(k) for c, k in zip(copies, got.lease.keys, strict=True)]
    if not intact:
        engine.call("lapsed", len(copies))
    say("intact" if intact else "lapsed", all(right))


COMMANDS = {
    "save": save,
    "wake": wake,
    "reserve": reserve,
    "slow-save": slow_save,
    "slow-wake": slow_wake,
}
