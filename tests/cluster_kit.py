"""A service in an embedded Ray cluster of a test's own, and an engine that speaks its verbs."""

import asyncio
import contextlib
import os
import random
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tiered_kv import connecting, errors, keys, liveness
from tiered_kv.assemble import host
from tiered_kv.checksum import checksum
from tiered_kv.config import Config
from tiered_kv.connecting import Cluster
from tiered_kv.directory import Member
from tiered_kv.layout import KVLayout
from tiered_kv.node import Node
from tiered_kv.sessions import Session, SessionId
from tiered_kv.settings import load
from tiered_kv.tiers.hbm import PoolView, attach_pool
from tiered_kv.types import BlockKey, Medium, Refused
from tiered_kv.wire import Committed, Fetched, Link, Welcome, life_of

LAYOUT = KVLayout("kit", "float16", layers=4, kv_heads=2, head_dim=64, block_tokens=32)
NBYTES = LAYOUT.block_bytes  # 64 KiB
SECRET = b"test"
PATIENCE_S = 60.0
CALL_S = 20.0


def until(check: Callable[[], Any], what: str, seconds: float = PATIENCE_S) -> Any:
    """The first truthy answer of `check`; fails with `what` when there is none in time."""
    end = time.monotonic() + seconds
    while not (answer := check()):
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.05)
    return answer


def content(key: BlockKey) -> bytes:
    """The bytes that belong to a block: they follow from its key, so a wrong one shows."""
    return random.Random(key).randbytes(NBYTES)


@contextmanager
def folders() -> Iterator[tuple[Path, Path]]:
    """A short folder on disk (Ray's sockets lie below it) and one in shared memory."""
    root = Path(tempfile.mkdtemp(prefix="kv", dir="/tmp"))
    shm = Path(tempfile.mkdtemp(prefix="tiered-kv-test-", dir="/dev/shm"))
    try:
        yield root, shm
    finally:
        shutil.rmtree(root, ignore_errors=True)  # Ray's last log lines may still arrive
        shutil.rmtree(shm)


def config_in(root: Path, shm: Path, namespace: str = "kv-test", **service: Any) -> Config:
    """A small service: HBM 8 MiB, DRAM 16 MiB, NVMe 64 MiB; blocks of 64 KiB."""
    return load(
        overrides={
            "hbm": {"bytes": "8MiB", "device": "cpu", "verify": 1.0},
            "dram": {"bytes": "16MiB", "folder": str(shm)},
            "nvme": {
                "bytes": "64MiB",
                "folder": str(root / "nvme"),
                "free_floor_bytes": "1MiB",
                "engine": "threads",
            },
            "service": {"namespace": namespace, "tenant_secret": SECRET.decode(), **service},
        },
        environ={},
    )


@contextmanager
def environment(root: Path) -> Iterator[None]:
    """Ray's files under `root`; its workers find this package and these helpers."""
    package = Path(errors.__file__).parents[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(root))
        patch.setenv("PYTHONPATH", f"{package}{os.pathsep}{Path(__file__).parent}")
        patch.delenv("RAY_ADDRESS", raising=False)
        yield


@contextmanager
def embedded(config: Config, root: Path) -> Iterator[Cluster]:
    """`connect(embedded=True)`. Afterwards no process and no file in shared memory may be left."""
    with environment(root):
        before = set(psutil.Process().children(recursive=True))
        cluster = connecting.connect(config, embedded=True, wait_s=240)
        try:
            yield cluster
        finally:
            started = set(psutil.Process().children(recursive=True)) - before
            cluster.close()
            _, alive = psutil.wait_procs(started, timeout=PATIENCE_S)
            assert [" ".join(p.cmdline()) for p in alive] == []
            left = [f.name for f in config.shm_folder.iterdir() if f.suffix == ".arena"]
            assert left == []


@dataclass(frozen=True)
class Got:
    """What a wake brought: blocks whose bytes were right, and blocks that did not come."""

    blocks: int
    missed: int
    found: tuple[Medium, ...]


class Engine:
    """Saves and wakes sessions whose bytes follow from their name, over any link.

    A wake fails the test when a block has other bytes than its own. After `Unreachable` or
    `StaleHandle` it attaches anew at the next call, like every client.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.owner = f"engine-{uuid.uuid4().hex}"
        self.pool: PoolView | None = None
        self.welcome: Welcome | None = None
        self._alive: liveness.Alive | None = None

    def attach(self) -> Welcome:
        """One call: introduce the layout, map the pool."""
        self.welcome = self.call("hello", LAYOUT)
        if self._alive is None:
            self._alive = liveness.hold(Path(self.welcome.shm_folder), self.owner)
        self.pool = attach_pool(self.welcome.pool)
        return self.welcome

    def detach(self) -> None:
        if self.pool is not None:
            self.pool.close()
        self.pool = self.welcome = None

    def close(self) -> None:
        self.detach()
        if self._alive is not None:
            self._alive.close()

    def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        return self.link.call(verb, *args, timeout_s=CALL_S, **kwargs)

    def save(self, session: str, blocks: int, durable: bool = False) -> Committed | Refused:
        """Two calls once attached."""
        with self._reattaching():
            chain = keys.chain(LAYOUT, SECRET, tokens_of(session, blocks))
            answer = self.call("reserve", LAYOUT.fingerprint, chain.keys, self.owner)
            if isinstance(answer, Refused):
                return answer
            self.same_life(answer.id, "abort")
            sums = []
            for key, slot in zip(answer.keys, answer.slots, strict=True):
                data = content(key)
                view_of(self.pool, slot)[:] = data
                sums.append(checksum(data))
            record = Session(
                SessionId(session), LAYOUT.fingerprint, tuple(chain.keys),
                blocks * LAYOUT.block_tokens, False, 0.0,
            )  # fmt: skip
            committed: Committed = self.call(
                "commit", answer.id, sums, session=record, durable=durable
            )
            return committed

    def wake(self, session: str, deadline_s: float | None = None) -> Got:
        """Two calls once attached. Compares every byte."""
        with self._reattaching():
            got: Fetched = self.call("wake", session, LAYOUT.fingerprint, None, deadline_s)
            lease = got.lease
            self.same_life(lease.id, "release")
            copies = [bytes(view_of(self.pool, slot)) for slot in lease.slots]
            assert self.pool is not None
            intact = self.pool.generations.unchanged(lease.slots, lease.generations)
            self.call("release", lease.id)
            if not intact:
                return Got(0, len(lease.keys) + got.missed, ())
            for key, copy in zip(lease.keys, copies, strict=True):
                assert copy == content(key), f"wrong bytes for block {key.hex()} of {session}"
            return Got(len(copies), got.missed, tuple(got.found))

    def same_life(self, handle: int, give_back: str) -> None:
        """Slots are those of the pool that is mapped here, or they are given back and this raises
        `StaleHandle`: the node may have restarted while another engine kept the layout known."""
        assert self.welcome is not None
        if life_of(handle) != self.welcome.life:
            self.call(give_back, handle)
            raise errors.StaleHandle("the node has restarted")

    @contextmanager
    def _reattaching(self) -> Iterator[None]:
        try:
            if self.pool is None:
                self.attach()
            yield
        except (errors.Unreachable, errors.StaleHandle, errors.BadLayout):
            self.detach()
            raise


def tokens_of(session: str, blocks: int) -> list[int]:
    rng = random.Random(session)
    return [rng.randrange(50_000) for _ in range(blocks * LAYOUT.block_tokens)]


def view_of(pool: PoolView | None, slot: int) -> memoryview:
    assert pool is not None
    return memoryview(pool.tensor[slot : slot + NBYTES].numpy())


def only_member(cluster: Cluster) -> Member:
    """The only member, once it has announced itself: after a kill that takes a beat."""
    until(lambda: len(cluster.members()) == 1, "there is one member")
    return cluster.members()[0]


def node_status(cluster: Cluster) -> dict[str, Any]:
    """The status of the only node."""
    (status,) = cluster.status()["nodes"].values()
    return dict(status)


def gpu_status(cluster: Cluster) -> dict[str, Any]:
    """The status of the only GPU actor."""
    (status,) = cluster.status()["gpus"].values()
    return dict(status)


class Counting:
    """A link that counts its calls."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.verbs: list[str] = []

    def call(self, verb: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        self.verbs.append(verb)
        return self.link.call(verb, *args, timeout_s=timeout_s, **kwargs)


async def host_whose_disk_waits(config: Config) -> Node:
    """A host whose NVMe reads wait as long as the file `pause` lies beside its folder.

    At module level: Ray sends it to the actor by name.
    """
    pause = config.nvme_folder.parent / "pause"
    node = await host(config)
    nvme = node.parts.nvme
    assert nvme is not None
    read = nvme.read

    def waiting_read(*args: Any) -> Any:
        while pause.exists():
            time.sleep(0.02)
        return read(*args)

    with contextlib.suppress(AttributeError):
        nvme.read = waiting_read  # type: ignore[method-assign]
    assert nvme.read is waiting_read
    return node


async def host_whose_loop_hangs(config: Config) -> Node:
    """A host whose event loop stands still as long as the file `hang` lies beside its folder."""
    hang = config.nvme_folder.parent / "hang"
    node = await host(config)

    async def block() -> None:
        while True:
            await asyncio.sleep(0.02)
            while hang.exists():
                time.sleep(0.02)  # noqa: ASYNC251

    node.test_task = asyncio.create_task(block())  # type: ignore[attr-defined]
    return node


def in_namespace(config: Config, namespace: str, folder: Path) -> Config:
    """The same service once more, beside the first."""
    return replace(
        config,
        service=replace(config.service, namespace=namespace),
        nvme=replace(config.nvme, folder=str(folder)),
    )
