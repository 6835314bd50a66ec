"""Starting and stopping a service in a Ray cluster."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import ray

from tiered_kv.actors import fleet
from tiered_kv.actors.shell import COORDINATOR, Build
from tiered_kv.config import Config
from tiered_kv.directory import Member
from tiered_kv.errors import TieredKVError, Unreachable
from tiered_kv.joining import join
from tiered_kv.raylink import RayLink

POLL_S = 0.2
PING_S = 5.0
LEAVE_S = 15.0
"""After which an actor that was asked to leave is killed."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Up:
    """What runs now. `skipped` Ray nodes offer no resource for a node actor; `notes` are
    sentences about actors that were there before, with another configuration."""

    namespace: str
    embedded: bool
    members: tuple[Member, ...]
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Down:
    """What was stopped: actors that ended as asked, blocks that were written below by it, and
    actors that had to be killed."""

    stopped: tuple[str, ...]
    flushed_blocks: int
    killed: tuple[str, ...]


def up(
    config: Config, *, address: str | None = None, embedded: bool | None = None,
    wait_s: float = 120.0, say: Say | None = None, build: Build | None = None,
) -> Up:  # fmt: skip
    """Join Ray (see `joining.join`), start what is missing, wait until all of it answers.

    Idempotent: nodes that joined since get their actors, the others are left alone. `say` hears
    a line whenever something changes. Raises what keeps a node from starting, after removing it:
    `FolderInUse`, `DoesNotFit`, `BadConfig`, `TierBroken`; and `Unreachable` after `wait_s`.
    """
    own = join(address, embedded)
    try:
        return ensure(config, embedded=own, wait_s=wait_s, say=say, build=build)
    except BaseException:
        if own:
            ray.shutdown()
        raise


def ensure(
    config: Config, *, embedded: bool = False, wait_s: float = 120.0, say: Say | None = None,
    build: Build | None = None,
) -> Up:  # fmt: skip
    """`up` in the cluster that this process has joined."""
    namespace = config.service.namespace
    end = time.monotonic() + wait_s
    nodes = fleet.ray_nodes()
    usable = [node for node in nodes if node.usable]
    wanted = [name for node in usable for name in (node.actor, *node.gpus_with(config))]
    expected = [COORDINATOR, *wanted]
    links = {name: RayLink(name, namespace) for name in expected}
    _wait_all(links, lambda: fleet.start(config, usable, build), end, say or (lambda line: None))
    members = _wait_announced(links[COORDINATOR], wanted, end)
    return Up(
        namespace, embedded, tuple(members),
        tuple(n.id for n in nodes if not n.usable), tuple(_differences(config, links)),
    )  # fmt: skip


def down(
    config: Config, *, address: str | None = None, wait_s: float = 60.0, flush: bool = True
) -> Down:
    """Stop the service: GPU actors, then node actors with what only memory holds written to disk,
    then the coordinator. Returns when no actor of it is left; nothing to stop is fine.

    An actor that does not stop in `wait_s` is killed: what it had acknowledged as durable stays.
    Raises `Unreachable` when there is no cluster.
    """
    join(address, embedded=False)
    namespace = config.service.namespace
    stopped: list[str] = []
    killed: list[str] = []
    flushed = 0
    for kind in ("gpu-", "node-", COORDINATOR):
        names = [name for name in fleet.named(namespace) if name.startswith(kind)]
        for name, blocks, gone in _remove(names, namespace, wait_s, flush):
            (stopped if gone else killed).append(name)
            flushed += blocks
    return Down(tuple(stopped), flushed, tuple(killed))


def _wait_all(links: dict[str, RayLink], start: Callable[[], None], end: float, say: Say) -> None:
    """Until all answer. Raises the first lasting problem, after removing who has one.

    An actor that was ending when this began leaves its name after it: then it is started again.
    """
    namespace = next(iter(links.values())).namespace
    waiting = dict.fromkeys(links, "")
    while waiting:
        if not waiting.keys() <= set(fleet.named(namespace)):
            start()
        failed: dict[str, TieredKVError] = {}
        for name in list(waiting):
            try:
                links[name].call("ping", timeout_s=PING_S)
            except Unreachable as error:
                if waiting[name] != str(error):
                    say(f"{name}: {error}")
                waiting[name] = str(error)
            except TieredKVError as error:
                failed[name] = error
            else:
                del waiting[name]
                say(f"{name}: up")
        if failed:
            # What cannot start must not keep trying: it would take the folder as soon as the
            # service that owns it restarts.
            _remove(list(failed), namespace, LEAVE_S, flush=False)
            name, problem = next(iter(failed.items()))
            raise type(problem)(f"{name}: {problem}")
        if waiting and time.monotonic() > end:
            name, why = next(iter(waiting.items()))
            raise Unreachable(f"{name} is not up: {why or 'no answer'}")
        if waiting:
            time.sleep(POLL_S)


def _wait_announced(coordinator: RayLink, wanted: list[str], end: float) -> list[Member]:
    while True:
        members: list[Member] = coordinator.call("members", timeout_s=PING_S)
        seen = {name for m in members for name in (m.actor, *m.gpus)}
        missing = [name for name in wanted if name not in seen]
        if not missing:
            return members
        if time.monotonic() > end:
            raise Unreachable(f"{missing[0]} is up, but has not announced itself")
        time.sleep(POLL_S)


def _differences(config: Config, links: dict[str, RayLink]) -> Iterable[str]:
    """Fields in which node actors that were there before differ from `config`."""
    for name, link in links.items():
        if not name.startswith("node-"):
            continue
        runs = link.call("about", timeout_s=PING_S)["config"]
        for section in ("dram", "nvme"):
            for key, value in config.as_dict()[section].items():
                if runs[section][key] != value and key not in ("folder", "devices"):
                    yield f"{name} runs with {section}.{key} = {runs[section][key]}, not {value}"


def _remove(
    names: list[str], namespace: str, wait_s: float, flush: bool
) -> list[tuple[str, int, bool]]:
    """End actors side by side: name, blocks flushed, whether it went by itself."""
    if not names:
        return []
    with ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(lambda name: _end(name, namespace, wait_s, flush), names))


def _end(name: str, namespace: str, wait_s: float, flush: bool) -> tuple[str, int, bool]:
    link, blocks = RayLink(name, namespace), 0
    try:
        blocks = link.call("stop", flush, timeout_s=wait_s)["flushed"]
        link.call("leave", timeout_s=LEAVE_S)
    except Unreachable:
        pass  # ending is no answer
    end = time.monotonic() + LEAVE_S
    while name in fleet.named(namespace):
        if time.monotonic() > end:
            try:
                ray.kill(ray.get_actor(name, namespace), no_restart=True)
            except ValueError:
                break  # it went at this moment
            return name, blocks, False
        time.sleep(POLL_S)
    return name, blocks, True
