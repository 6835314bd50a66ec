"""Starting a node in the background of an actor process."""

import threading
import time

import pytest

from tiered_kv.actors import life
from tiered_kv.actors.life import Life
from tiered_kv.errors import DoesNotFit, FolderInUse, Unreachable


class Stopped:
    """Stands for a running node."""

    def __init__(self, build):
        import asyncio

        asyncio.run(build())
        self.flushed = None

    def stop(self, flush):
        self.flushed = flush


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(life, "Runner", Stopped)
    monkeypatch.setattr(life, "RETRY_S", (0.01,))


def until(check, seconds=20.0):
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end
        time.sleep(0.005)


def problem(of):
    try:
        _ = of.runner
    except (DoesNotFit, FolderInUse, Unreachable) as error:
        return error
    return None


def build_that(*outcomes):
    left = list(outcomes)

    async def build():
        outcome = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(outcome, Exception):
            raise outcome

    return build


def test_a_folder_that_a_dying_predecessor_holds_is_waited_for():
    one = Life(build_that(FolderInUse("held by pid 7"), FolderInUse("held by pid 7"), None))
    assert isinstance(problem(one), Unreachable)
    one.start()
    until(lambda: problem(one) is None)
    one.stop()


def test_a_folder_that_stays_locked_becomes_the_callers_error():
    one = Life(build_that(FolderInUse("held by pid 7")), grace_s=0.2)
    one.start()
    until(lambda: isinstance(problem(one), FolderInUse))
    assert str(problem(one)) == "held by pid 7"
    one.stop()


def test_a_start_that_fails_is_reported_at_once_and_heals_by_itself():
    fits = threading.Event()

    async def build():
        if not fits.is_set():
            raise DoesNotFit("needs 9 bytes, has 7")

    one = Life(build)
    one.start()
    until(lambda: isinstance(problem(one), DoesNotFit))
    fits.set()
    until(lambda: problem(one) is None)
    one.stop()


def test_a_defect_at_start_is_one_line_and_not_an_endless_wait():
    one = Life(build_that(ZeroDivisionError("x / 0")))
    one.start()
    until(lambda: "cannot start: ZeroDivisionError: x / 0" in str(problem(one)))
    one.stop()


def test_a_start_tells_how_far_it_is():
    go = threading.Event()

    async def build():
        one.progress(30, 120)
        go.wait()

    one = Life(build)
    one.start()
    until(lambda: "25 % prepared" in str(problem(one)))
    go.set()
    one.stop()


def test_stopping_ends_a_node_or_its_attempts_and_is_idempotent():
    running, failing, idle = (
        Life(build_that(None)),
        Life(build_that(DoesNotFit("x"))),
        Life(build_that(None)),
    )
    running.start()
    until(lambda: problem(running) is None)
    node = running.runner
    failing.start()
    for one in (running, failing, idle):
        one.stop(flush=False)
        one.stop(flush=False)
        assert str(problem(one)) == "the node has been stopped"
    assert node.flushed is False
