"""`tiered-kv demo`: chats that sleep and wake, with a real model."""

import os
from typing import TYPE_CHECKING, Any

import click

from tiered_kv.cli.cluster import hush_ray
from tiered_kv.cli.failures import Failure
from tiered_kv.cli.options import Options, common, json_target
from tiered_kv.cli.output import Screen, emit, rows, size, table

if TYPE_CHECKING:
    from rich.table import Table

    from tiered_kv.client import Client
    from tiered_kv.config import Config

EXTRA = "pip install 'tiered-kv[transformers]'"


@click.command()
@click.option("--sessions", default=12, show_default=True, type=click.IntRange(1),
              help="Chats to hold; HBM has room for 3 of them.")  # fmt: skip
@click.option("--ray/--no-ray", default=True, show_default=True,
              help="In a Ray cluster of its own, or within this process.")  # fmt: skip
@json_target
@common
def demo(options: Options, sessions: int, ray: bool, json_to: str | None) -> None:
    """More chats than HBM has room for, none forgotten.

    Each chat reads a document and answers; all but a few are moved to DRAM and NVMe. Then each is
    woken and asked again, and its answer is compared with that of a chat that never slept. Fails
    when an answer differs, a block fails its check, or memory runs out.
    """
    with Screen(json_to) as screen, options.exported():
        screen.step("loading torch and transformers")
        report = _run(sessions, ray, screen)
        screen.show(summary(report))
    emit(report, json_to)
    if wrong := problems(report):
        raise Failure(wrong)


def _run(sessions: int, ray: bool, screen: Screen) -> dict[str, Any]:
    try:
        import torch

        from tiered_kv.demo.run import run
    except ModuleNotFoundError as error:
        raise Failure(f"the demo needs {error.name}: {EXTRA}") from error
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    connect = embedded if ray else within
    return run(sessions, connect, screen.say, screen.step).as_json()


def embedded(config: "Config") -> "Client":
    """A client with a Ray cluster of its own, which ends with it."""
    hush_ray()
    from tiered_kv.client import Client
    from tiered_kv.connecting import connect

    cluster = connect(config, embedded=True)
    try:
        return Client(cluster)
    except BaseException:
        cluster.close()
        raise


def within(config: "Config") -> "Client":
    """A client with the service in this process."""
    from tiered_kv.local import local

    return local(config)


def summary(report: dict[str, Any]) -> "Table":
    """What the demo shows, a fact a row."""
    anew = report["recompute_ms"]
    facts = [
        ("sessions held", f"{report['sessions']}, with HBM alone {report['hbm_only_sessions']}"),
        ("identical answers", f"{report['identical']} of {report['sessions']}"),
    ]
    for tier, wake in report["wake_ms"].items():
        faster = anew["p50"] / wake["p50"] if wake["p50"] else 0
        facts.append((
            f"woken from {tier}",
            f"p50 {wake['p50']:.1f} ms, p99 {wake['p99']:.1f} ms, {wake['count']} sessions, "
            f"{faster:.0f} times as fast as computed anew",
        ))  # fmt: skip
    facts.append(("computed anew", f"p50 {anew['p50']:.0f} ms, p99 {anew['p99']:.0f} ms"))
    for leg, nbytes in report["bytes_moved"].items():
        blocks = report["blocks_moved"][leg]
        facts.append((f"moved {leg.replace('-', ' to ')}", f"{blocks} blocks, {size(nbytes)}"))
    facts += [
        ("checks failed", str(report["checks_failed"])),
        ("out of memory", str(report["out_of_memory"])),
    ]
    return rows(table("", ""), facts)


def problems(report: dict[str, Any]) -> str:
    """Why the demo failed; empty when it did not."""
    found = []
    if differ := report["sessions"] - report["identical"]:
        found.append(f"{differ} of {report['sessions']} answers differ")
    if report["checks_failed"]:
        found.append(f"{report['checks_failed']} blocks failed their check")
    if report["out_of_memory"]:
        found.append(f"memory ran out {report['out_of_memory']} times")
    return ", ".join(found)
