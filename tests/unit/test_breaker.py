"""When a medium is taken out, and when it is tried again."""

from tiered_kv.breaker import FIRST_WAIT_S, LONGEST_WAIT_S, THRESHOLD, Breaker


def opened(now=100.0):
    breaker = Breaker()
    assert [breaker.failed("disk", now) for _ in range(THRESHOLD)][-1] is True
    return breaker


def test_it_opens_once_after_failures_in_a_row():
    breaker = Breaker()
    assert [breaker.failed("x", 0.0) for _ in range(THRESHOLD + 2)] == [
        *[False] * (THRESHOLD - 1), True, False, False,
    ]  # fmt: skip
    assert (breaker.open, breaker.why) == (True, "x")


def test_a_success_between_failures_starts_the_count_anew():
    breaker = Breaker()
    for _ in range(5):
        for _ in range(THRESHOLD - 1):
            assert not breaker.failed("x", 0.0)
        breaker.ok()
    assert not breaker.open


def test_what_is_beyond_doubt_opens_it_at_once_and_only_once():
    breaker = Breaker()
    assert breaker.failed_now("gone", 0.0)
    assert not breaker.failed_now("gone", 0.0)
    assert breaker.open


def test_a_late_success_does_not_close_it():
    breaker = opened()
    breaker.ok()
    assert breaker.open


def test_a_closed_one_asks_for_no_probe():
    assert not Breaker().probe_due(1e9)


def test_probes_are_due_after_waits_that_double_up_to_a_limit():
    breaker, now, waits = opened(now=0.0), 0.0, []
    for _ in range(10):
        began = now
        while not breaker.probe_due(now):
            now += 0.5
        waits.append(now - began)
        assert not breaker.probe_due(now)  # once a wait
    assert waits[:4] == [FIRST_WAIT_S, 2.0, 4.0, 8.0]
    assert waits[-3:] == [LONGEST_WAIT_S] * 3


def test_after_a_good_probe_it_takes_as_many_failures_and_as_short_a_wait_as_before():
    breaker = opened(now=0.0)
    for now in (1.0, 3.0, 7.0):
        assert breaker.probe_due(now)
    breaker.probed()
    assert (breaker.open, breaker.why) == (False, "")
    assert [breaker.failed("y", 50.0) for _ in range(THRESHOLD)][-1] is True
    assert not breaker.probe_due(50.0 + FIRST_WAIT_S - 0.1)
    assert breaker.probe_due(50.0 + FIRST_WAIT_S)
