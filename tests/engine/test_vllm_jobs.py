"""Transfers as the engine's thread sees them: who owns the pages, and when."""

import threading

from service_kit import LONG_S, until

from tiered_kv.integrations.vllm.jobs import Job


def test_a_job_that_was_taken_back_never_begins() -> None:
    job = Job("a", 0.0)
    job.yield_()
    assert job.over
    assert not job.begin()


def test_a_copy_that_runs_is_waited_for_before_its_pages_go() -> None:
    job = Job("a", 0.0)
    assert job.begin()
    order: list[str] = []
    taken = threading.Thread(target=lambda: (job.yield_(), order.append("taken")))
    taken.start()
    taken.join(0.05)
    assert order == []
    order.append("copied")
    job.pause()
    taken.join(LONG_S)
    assert order == ["copied", "taken"]
    assert not job.begin()


def test_giving_up_does_not_wait_for_a_copy() -> None:
    job = Job("a", 0.0)
    assert job.begin()
    assert not job.give_up()
    assert not job.over
    job.pause()
    assert job.give_up()
    assert job.over


def test_a_job_may_copy_again_and_again_until_it_ends() -> None:
    job = Job("a", 0.0)
    for _ in range(3):
        assert job.begin()
        job.pause()
    job.end()
    job.end()
    assert not job.begin()


def test_pausing_after_the_end_does_not_bring_a_job_back() -> None:
    job = Job("a", 0.0)
    job.end()
    job.pause()
    assert job.over


def test_waiting_tells_whether_a_job_is_over() -> None:
    job = Job("a", 0.0)
    assert not job.wait(0.0)
    waiting: list[bool] = []
    thread = threading.Thread(target=lambda: waiting.append(job.wait(LONG_S)))
    thread.start()
    job.end()
    thread.join(LONG_S)
    assert waiting == [True]


def test_many_threads_never_see_a_copy_after_the_pages_were_taken() -> None:
    for _ in range(200):
        job, owned = Job("a", 0.0), threading.Event()
        wrong: list[str] = []

        def copy(job: Job = job, owned: threading.Event = owned, wrong: list[str] = wrong) -> None:
            while job.begin():
                if owned.is_set():
                    wrong.append("copied pages of somebody else")
                job.pause()

        thread = threading.Thread(target=copy)
        thread.start()
        job.yield_()
        owned.set()
        thread.join(LONG_S)
        assert wrong == []
        until(lambda thread=thread: not thread.is_alive(), "the end of the copies")
