"""`tiered-kv up` and `down`: starting the service in a Ray cluster, and stopping it."""

import signal
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from tiered_kv.cli import tables
from tiered_kv.cli.cluster import hush_ray, no_ray, short, stderr_elsewhere
from tiered_kv.cli.failures import Failure
from tiered_kv.cli.options import Options, address, common, json_target
from tiered_kv.cli.output import Screen, emit
from tiered_kv.errors import Unreachable
from tiered_kv.ray_address import ray_address

if TYPE_CHECKING:
    from tiered_kv.actors.launch import Up
    from tiered_kv.config import Config

OF_ITS_OWN = "or give --block for a cluster that ends with this command"


@click.command()
@address
@click.option("--wait", "wait_s", default=120.0, show_default=True, metavar="SECONDS",
              type=click.FloatRange(0, min_open=True), help="How long to wait.")  # fmt: skip
@click.option("--block", is_flag=True,
              help="Stay until Ctrl-C; without a Ray cluster, start one until then.")  # fmt: skip
@common
def up(options: Options, address: str | None, wait_s: float, block: bool) -> None:
    """Start the service on every node of a Ray cluster.

    Waits until all of it answers. Nodes that run already are left alone, so it may
    be repeated, for instance after a node came.
    """
    config = options.config()
    where = ray_address(address)
    with Screen() as screen, ExitStack() as stack:
        screen.say(f"configuration:\n{config.describe()}")
        screen.step("joining Ray")
        started = _start(config, where, wait_s, block, screen, stack)
        _show(config, started, screen)
        if block:
            screen.say("running until Ctrl-C")
            while True:
                signal.pause()


def _start(
    config: "Config", where: str | None, wait_s: float, block: bool, screen: Screen,
    stack: ExitStack,
) -> "Up":  # fmt: skip
    """`stack` stops what ends with this command."""
    hush_ray()
    import ray

    from tiered_kv.actors import launch

    try:
        started = launch.up(
            config, address=where, embedded=None if block else False, wait_s=wait_s,
            say=lambda line: screen.step(short(line)),
        )  # fmt: skip
    except Unreachable as error:
        if ray.is_initialized():
            raise
        raise Unreachable(f"{no_ray(where)}, {OF_ITS_OWN}") from error
    if started.embedded:
        stack.callback(ray.shutdown)
        stack.callback(launch.down, config)
    return started


def _show(config: "Config", started: "Up", screen: Screen) -> None:
    """What runs where."""
    import ray

    from tiered_kv.connecting import connect

    cluster = connect(config, embedded=False)
    screen.show(*tables.tiers(cluster.status()))
    for member in started.members:
        gpus = ", ".join(map(short, member.gpus)) or "no GPU actor"
        screen.say(f"{short(member.actor)}: node {member.node_id[:8]}, {gpus}")
    for node in started.skipped:
        screen.say(f"node {node[:8]} of Ray offers no resource for an actor and was skipped")
    for note in started.notes:
        screen.say(note)
    screen.say(
        f"up in namespace {started.namespace!r} of the Ray cluster at "
        f"{ray.get_runtime_context().gcs_address}"
    )


@click.command()
@address
@click.option("--wait", "wait_s", default=60.0, show_default=True, metavar="SECONDS",
              type=click.FloatRange(0, min_open=True),
              help="After that, an actor that does not stop is killed.")  # fmt: skip
@click.option("--flush/--no-flush", default=True, show_default=True,
              help="Write what only memory holds to NVMe first.")  # fmt: skip
@json_target
@common
def down(
    options: Options, address: str | None, wait_s: float, flush: bool, json_to: str | None
) -> None:
    """Stop the service; NVMe keeps what it held."""
    config = options.config()
    where = ray_address(address)
    hush_ray()
    import ray

    from tiered_kv.actors import fleet, launch

    namespace = config.service.namespace
    with Screen(json_to) as screen:
        screen.step(f"stopping the service in namespace {namespace!r}")
        try:
            with stderr_elsewhere():
                ended = launch.down(config, address=where, wait_s=wait_s, flush=flush)
        except Unreachable as error:
            if ray.is_initialized():
                raise
            raise no_ray(where) from error
        left = fleet.named(namespace)
        screen.quiet()
        for name in ended.killed:
            screen.say(f"{short(name)} did not stop in {wait_s:g} s and was killed")
        screen.say(
            f"stopped {len(ended.stopped)} actors, killed {len(ended.killed)}, wrote "
            f"{ended.flushed_blocks} blocks to disk; {len(left)} actors are left in "
            f"namespace {namespace!r}"
        )
    emit(asdict(ended) | {"namespace": namespace, "left": left}, json_to)
    if left:
        raise Failure(f"still running: {', '.join(map(short, left))}")
