"""Small services inside the test's process, links that fail on command, and a client's content."""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster_kit import LAYOUT, SECRET, config_in, content, folders, until

from tiered_kv import assemble, keys
from tiered_kv.client import Client, Saved, Woken
from tiered_kv.config import Config
from tiered_kv.errors import Unreachable
from tiered_kv.hierarchy import check
from tiered_kv.layout import KVLayout
from tiered_kv.runner import Runner
from tiered_kv.settings import load
from tiered_kv.types import Reservation
from tiered_kv.wire import Link

LONG_S = 30.0
MB = 1 << 20


def small(root: Path, shm: Path, **sections: dict[str, Any]) -> Config:
    """HBM 1 MiB, DRAM 2 MiB, NVMe 8 MiB: 16, 32 and 128 blocks of 64 KiB."""
    base: dict[str, dict[str, Any]] = {
        "hbm": {"bytes": "1MiB", "device": "cpu", "verify": 1.0},
        "dram": {"bytes": "2MiB", "folder": str(shm), "restore_floor": 0.0},
        "nvme": {
            "bytes": "8MiB",
            "folder": str(root / "nvme"),
            "free_floor_bytes": "1MiB",
            "engine": "threads",
        },
        "service": {"tenant_secret": SECRET.decode()},
    }
    for name, section in sections.items():
        base[name] |= section
    return load(overrides=base, environ={})


class Revived:
    """A link to a node that can be stopped, killed and started again. Thread-safe."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build
        self.runner: Runner | None = None
        self.start()

    def start(self) -> Runner:
        self.runner = Runner(self._build)
        return self.runner

    def stop(self, flush: bool = True) -> None:
        runner, self.runner = self.runner, None
        if runner is not None:
            runner.stop(flush)

    @property
    def node(self) -> Any:
        assert self.runner is not None
        return self.runner.node

    def call(self, verb: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        runner = self.runner
        if runner is None:
            raise Unreachable("nobody runs")
        return runner.call(verb, *args, timeout_s=timeout_s, **kwargs)


class Hooked:
    """A link with hooks: `before[verb](args)` runs before a call, `after[verb](answer)` after it;
    what they raise is raised. `verbs` has what was called."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.before: dict[str, Callable[..., Any]] = {}
        self.after: dict[str, Callable[..., Any]] = {}
        self.verbs: list[str] = []

    def call(self, verb: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        self.verbs.append(verb)
        if verb in self.before:
            self.before[verb](args)
        answer = self.link.call(verb, *args, timeout_s=timeout_s, **kwargs)
        if verb in self.after:
            self.after[verb](answer)
        return answer


class Service:
    """A host's node and a GPU's above it, each behind links with hooks. A client's directory."""

    def __init__(self, config: Config, gpu: bool = True) -> None:
        self.config = config
        self.host = Revived(lambda: assemble.host(config))
        self.to_host = Hooked(self.host)
        self.below = Hooked(self.host)  # what the GPU's node calls
        self.gpu = Revived(lambda: assemble.gpu(config, self.below)) if gpu else None
        self.to_gpu = Hooked(self.gpu) if self.gpu else None

    def link_for(self, session: str) -> Link:
        return self.to_gpu or self.to_host

    def nodes(self) -> list[dict[str, Any]]:
        every = [self.to_host, self.to_gpu] if self.to_gpu else [self.to_host]
        return [link.call("status", timeout_s=LONG_S) for link in every]

    def close(self) -> None:
        if self.gpu is not None:
            self.gpu.stop(flush=False)
        self.host.stop(flush=False)


@contextmanager
def service(gpu: bool = True, **sections: dict[str, Any]) -> Iterator[Service]:
    """Started, checked for leaks when the test has passed, and stopped."""
    with folders() as (root, shm):
        one = Service(small(root, shm, **sections), gpu)
        try:
            yield one
            for revived in (one.gpu, one.host):
                if revived is not None and revived.runner is not None:
                    at_rest(revived.runner)
        finally:
            one.close()
        assert [f.name for f in shm.iterdir() if "client" not in f.name] == []


def inside(runner: Any, ask: Callable[[Any], Any]) -> Any:
    """`ask(node)` on the node's own loop, where nothing else happens meanwhile."""

    async def answer() -> Any:
        return ask(runner.node)

    return asyncio.run_coroutine_threadsafe(answer(), _loop(runner)).result(LONG_S)


def _loop(runner: Any) -> asyncio.AbstractEventLoop:
    loop: asyncio.AbstractEventLoop = getattr(runner, "runner", runner)._loop
    return loop


def pending(runner: Any) -> dict[str, int]:
    return dict(inside(runner, lambda node: node.hierarchy.pending | {"q": node.mover.queued}))


def at_rest(runner: Any) -> None:
    """Wait until nothing is reserved, leased or moving; then every invariant holds."""
    until(lambda: not any(pending(runner).values()), f"at rest: {pending(runner)}", LONG_S)

    def verify(node: Any) -> None:
        check(node.hierarchy)
        for usage in node.hierarchy.usage():
            assert node.hierarchy.leaked_slots(usage.medium) == 0
            assert usage.reserved_bytes == 0

    inside(runner, verify)


class Slow:
    """Holds the verbs of a tier as long as `gate` is cleared, fails them while `error` is set,
    and counts the blocks of each."""

    def __init__(self, tier: Any) -> None:
        self.tier = tier
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.blocks = {"read": 0, "write": 0}
        for verb in self.blocks:
            setattr(tier, verb, self._wrapped(verb, getattr(tier, verb)))

    def _wrapped(self, verb: str, carry: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(blocks: Any, slots: Any) -> Any:
            self.blocks[verb] += len(blocks)
            assert self.gate.wait(LONG_S)
            if self.error is not None:
                raise self.error
            return carry(blocks, slots)

        return wrapped


class Speaker:
    """Saves and wakes sessions through a client; bytes follow from the blocks' keys."""

    def __init__(self, client: Client, layout: KVLayout = LAYOUT) -> None:
        self.client = client
        self.layout = layout
        self.filled: list[int] = []

    def save(self, session: str, tokens: list[int], durable: bool = False) -> Saved:
        chain = keys.chain(self.layout, SECRET, tokens).keys

        def fill(index: int, n: int, slot: Any) -> None:
            self.filled.append(index)
            assert 0 < n <= self.layout.block_tokens
            slot.numpy()[:] = memoryview(content(chain[index]))

        return self.client.save(session, self.layout, tokens, fill, durable=durable)

    def wake(self, session: str, tokens: list[int], **options: Any) -> Woken[int]:
        """Fails when one byte or token is not what was saved, now or at an earlier turn."""

        def copy(blocks: list[Any], n_tokens: int) -> list[bytes]:
            return [bytes(block.numpy().data) for block in blocks]

        woken = self.client.wake(session, self.layout, copy, **options)
        saved = woken.tokens.tolist() or tokens
        assert saved[: len(tokens)] == tokens[: len(saved)]
        chain = keys.chain(self.layout, SECRET, saved).keys
        for key, found in zip(chain, woken.value or (), strict=False):
            assert found == content(key), f"wrong bytes for {key.hex()} of {session}"
        return woken


def tokens(seed: object, n: int) -> list[int]:
    """`n` tokens that follow from a name; a longer list begins with the shorter one."""
    rng = random.Random(f"{seed}")
    return [rng.randrange(50_000) for _ in range(n)]


def reservation(link: Link, owner: str, run: list[Any]) -> Reservation:
    answer = link.call("reserve", LAYOUT.fingerprint, run, owner, timeout_s=LONG_S)
    assert isinstance(answer, Reservation), answer
    return answer


__all__ = [
    "LAYOUT", "LONG_S", "MB", "SECRET", "Hooked", "Revived", "Service", "Slow", "Speaker",
    "at_rest", "config_in", "content", "folders", "inside", "pending", "reservation", "service",
    "small", "tokens", "until",
]  # fmt: skip
