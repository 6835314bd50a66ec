import pytest

from tiered_kv.errors import BadInput
from tiered_kv.sim.clock import Clock, Process
from tiered_kv.sim.devices import LANE_WORKERS, Device, Leg, Traffic


def test_events_happen_in_the_order_of_their_times_and_equals_in_that_of_asking() -> None:
    clock, seen = Clock(), []
    clock.at(2.0, lambda: seen.append("late"))
    clock.at(1.0, lambda: seen.append("first"))
    clock.at(1.0, lambda: seen.append("second"))
    clock.run()
    assert seen == ["first", "second", "late"]
    assert clock.now == 2.0


def test_an_event_in_the_past_is_refused() -> None:
    clock = Clock()
    clock.run(5.0)
    with pytest.raises(BadInput, match="4"):
        clock.at(4.0, lambda: None)


def test_a_process_sleeps_waits_for_signals_and_ends() -> None:
    clock, seen = Clock(), []
    signal = clock.signal()

    def process() -> Process:
        yield 1.5
        seen.append(clock.now)
        yield signal
        seen.append(clock.now)
        yield signal  # has happened: goes on at once
        seen.append(clock.now)

    ended = clock.spawn(process())
    clock.at(4.0, signal.fire)
    clock.run()
    assert seen == [1.5, 4.0, 4.0]
    assert ended.fired


DRIVE = Device("drive", 10e9, 5e9, duplex=False)
LINK = Device("link", 40e9, 40e9)


def times(*transfers: tuple[str, bool, list[Leg], float, int]) -> dict[str, float]:
    """When each of (name, up, legs, GB, priority) ends, all submitted at 0."""
    clock, ended = Clock(), {}
    traffic = Traffic(clock)
    for name, up, legs, gb, priority in transfers:
        traffic.submit(
            ("lane", up), legs, int(gb * 1e9), priority,
            lambda name=name: ended.__setitem__(name, clock.now),
        )  # fmt: skip
    clock.run()
    return ended


UP, DOWN = [Leg(DRIVE, True), Leg(LINK, True)], [Leg(DRIVE, False)]


def test_a_transfer_alone_goes_as_fast_as_its_slowest_leg() -> None:
    assert times(("a", True, UP, 10, 0))["a"] == pytest.approx(1.0)


def test_latency_comes_before_the_first_byte() -> None:
    slow = Device("slow", 10e9, 10e9, latency_s=0.25)
    assert times(("a", True, [Leg(slow, True)], 10, 0))["a"] == pytest.approx(1.25)


def test_two_transfers_share_a_device_and_the_longer_one_gets_it_back() -> None:
    ended = times(("short", True, UP, 5, 0), ("long", True, UP, 10, 0))
    assert ended["short"] == pytest.approx(1.0)
    assert ended["long"] == pytest.approx(1.5)


def test_demotions_slow_restores_down_on_a_drive_but_not_on_a_duplex_link() -> None:
    assert times(("up", True, UP, 10, 0), ("down", False, DOWN, 50, 2))["up"] == pytest.approx(2.0)
    up, down = [Leg(LINK, True)], [Leg(LINK, False)]
    assert times(("up", True, up, 40, 0), ("down", False, down, 40, 2))["up"] == pytest.approx(1.0)


def test_what_waits_in_a_lane_goes_by_class_not_by_age() -> None:
    first = [(f"running-{i}", False, DOWN, 5.0, 2) for i in range(LANE_WORKERS)]
    ended = times(*first, ("demote", False, DOWN, 5, 2), ("store", False, DOWN, 5, 1))
    assert ended["store"] <= ended["demote"]
    assert ended["running-0"] < ended["store"]


def test_lanes_are_as_wide_as_those_of_the_mover() -> None:
    from tiered_kv import mover

    assert LANE_WORKERS == mover.LANE_WORKERS


@pytest.mark.parametrize(("field", "value"), [("read_bytes_per_s", 0.0), ("latency_s", -1.0)])
def test_a_device_that_cannot_be_names_its_field(field: str, value: float) -> None:
    numbers = {"read_bytes_per_s": 1.0, "write_bytes_per_s": 1.0, "latency_s": 0.0, field: value}
    with pytest.raises(BadInput, match=field):
        Device("odd", **numbers)
