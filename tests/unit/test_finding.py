"""What all ranks hold, what it costs to load, and how fast a leg is, without any media."""

import pytest

from tiered_kv.errors import BadInput
from tiered_kv.finding import check_asks, links, match, places, read_s, weigh
from tiered_kv.hierarchy import Hierarchy, TierSpec
from tiered_kv.pace import UNPROBED_BYTES_PER_S, Pace
from tiered_kv.policies.links import Link
from tiered_kv.policies.load_or_recompute import Prefill
from tiered_kv.types import BlockKey, Done, Fingerprint, Medium, Reservation
from tiered_kv.wire import Ask

MB, NBYTES = 1 << 20, 64 << 10
RANKS = [Fingerprint(bytes([r]) * 16) for r in range(3)]
DRAM, NVME = Medium.DRAM, Medium.NVME


def key(rank, i, tail=0):
    return BlockKey(bytes([rank, i, tail]) + b"k" * 13)


def run(rank, n):
    return tuple(key(rank, i) for i in range(n))


def tails(rank, n, names=2):
    return tuple(tuple(key(rank, i, j + 1) for j in range(names)) for i in range(n))


def ask(rank, n, with_tails=True):
    return Ask(RANKS[rank], run(rank, n), tails(rank, n + 1) if with_tails else ())


class Tiers:
    """DRAM above NVMe; moves end when they are told to."""

    def __init__(self):
        self.h = Hierarchy([TierSpec(DRAM, 4 * MB, MB), TierSpec(NVME, 8 * MB, MB)])

    def store(self, rank, keys, parents=None):
        held = self.h.reserve(keys, RANKS[rank], NBYTES, "o", parents)
        assert isinstance(held, Reservation)
        self.h.commit(held.id)

    def sleep(self, keys):
        """Only NVMe has these blocks afterwards."""
        self.h.persist(keys)
        for move in self.h.due(0.0):
            self.h.done(move, [Done(7)] * len(move.blocks))
        top = self.h.book.top
        for block in reversed(self.h.book.live(keys)):
            self.h.book.lose(block, top)

    def match(self, *asks, skip=0):
        return match(self.h.book, check_asks(asks), skip)


@pytest.fixture
def tiers():
    return Tiers()


def test_a_hit_is_what_every_rank_holds_in_the_slowest_tier_of_any(tiers):
    tiers.store(0, run(0, 5))
    tiers.store(1, run(1, 3))
    tiers.sleep([key(1, 2)])
    seen = tiers.match(ask(0, 6), ask(1, 6))
    assert (seen.blocks, seen.tail) == (3, 0)
    assert seen.media == (DRAM, DRAM, NVME)
    assert seen.runs == (run(0, 3), run(1, 3))
    assert seen.torn == (run(0, 5)[3:], ())


def test_the_longest_tail_that_every_rank_holds_is_found_behind_the_blocks(tiers):
    for rank in (0, 1):
        tiers.store(rank, run(rank, 2))
        for j in (1, 2):
            tiers.store(rank, [key(rank, 2, j)], [key(rank, 1)])
    seen = tiers.match(ask(0, 2), ask(1, 2))
    assert (seen.blocks, seen.tail) == (2, 2)
    assert seen.runs[1] == (*run(1, 2), key(1, 2, 2))
    assert seen.torn == ((), ())
    tiers.h.forget([key(0, 2, 2)])
    seen = tiers.match(ask(0, 4), ask(1, 4))
    assert (seen.blocks, seen.tail) == (2, 1)
    assert seen.torn == ((), (key(1, 2, 2),))


def test_without_names_of_tails_only_complete_blocks_are_found(tiers):
    tiers.store(0, run(0, 2))
    tiers.store(0, [key(0, 2, 1)], [key(0, 1)])
    assert tiers.match(ask(0, 2, with_tails=False)).tail == 0
    assert tiers.match(Ask(RANKS[0], run(0, 2), tails(0, 2))).tail == 0
    assert tiers.match(ask(0, 2)).tail == 1


def test_a_tail_is_nothing_for_an_engine_that_is_further(tiers):
    tiers.store(0, [*run(0, 1)])
    tiers.store(0, [key(0, 1, 1)], [key(0, 0)])
    assert tiers.match(ask(0, 3), skip=1).tail == 1
    assert tiers.match(ask(0, 3), skip=2).tail == 0


def test_a_block_on_its_way_up_counts_where_it_comes_from(tiers):
    tiers.store(0, run(0, 3))
    tiers.sleep(run(0, 3))
    assert tiers.h.want(run(0, 3), RANKS[0], NBYTES).moves
    assert places(tiers.h.book, run(0, 4)) == [NVME] * 3
    tiers.h.set_online(NVME, False)
    assert places(tiers.h.book, run(0, 4)) == []


def test_what_an_offline_tier_holds_is_no_hit(tiers):
    tiers.store(0, run(0, 3))
    tiers.sleep(run(0, 3)[1:])
    tiers.h.set_online(NVME, False)
    assert tiers.match(ask(0, 3)).blocks == 1


@pytest.mark.parametrize(
    ("asks", "says"),
    [
        ("x", "one Ask a rank, not 'x'"),
        ([], r"one Ask a rank, not \[\]"),
        (["x"], "must be an Ask, not 'x'"),
        ([Ask(RANKS[0], [b"short"])], "b'short'"),
        ([Ask(RANKS[0], run(0, 1) * 2)], "named twice"),
        ([Ask(RANKS[0], run(0, 1), 7)], "not 7"),
        ([Ask(RANKS[0], run(0, 3), ((),))], "3 blocks came with 1 lists"),
        ([ask(0, 2), ask(1, 3)], r"run of \[2, 3\] blocks"),
        ([ask(0, 2), ask(1, 2, with_tails=False)], r"tails of \[3, 0\] blocks"),
        ([Ask(RANKS[0], (), (("x",),))], "'x'"),
        ([Ask(RANKS[0], (), ((),)), Ask(RANKS[1], (), tails(1, 1))], r"know \[0, 2\] tails"),
    ],
    ids=str,
)
def test_a_bad_ask_is_refused_with_what_is_wrong(tiers, asks, says):
    with pytest.raises(BadInput, match=says):
        match(tiers.h.book, check_asks(asks), 0)


# -- weighing -------------------------------------------------------------------------------


def weighed(media, legs, **options):
    base = {"block_tokens": 32, "block_bytes": NBYTES, "before": 0, "new_tokens": 32,
            "prefill": Prefill(1e-4), "copy": None}  # fmt: skip
    return weigh(media, legs, **(base | options))


def test_blocks_in_the_pool_are_loaded_and_those_on_a_slow_leg_are_not():
    media = [DRAM] * 4 + [NVME] * 4
    assert weighed(media, {NVME: Link(1e9)}).load == 8
    assert weighed(media, {NVME: Link(1e6)}).load == 4
    assert weighed(media, {NVME: Link(1e9, queued_bytes=1e9)}).load == 4
    assert weighed(media, {NVME: Link(1e9)}, copy=Link(1e5)).load == 0


def test_what_is_before_the_hit_makes_computing_dearer():
    prefill = Prefill(0.0, 1e-9)
    slow = {NVME: Link(2.5e9)}
    assert weighed([NVME] * 4, slow, prefill=prefill, new_tokens=0).load == 0
    assert weighed([NVME] * 4, slow, prefill=prefill, new_tokens=0, before=100).load == 4


def test_reading_takes_as_long_as_the_slowest_tier_takes():
    legs = {NVME: Link(1e6, queued_bytes=1e6), Medium.HOST: Link(1e7)}
    assert read_s([DRAM, NVME, Medium.HOST], legs, 1_000_000) == pytest.approx(2.0)
    assert read_s([DRAM], legs, 1_000_000) == 0.0


# -- how fast a leg is ----------------------------------------------------------------------


def test_a_leg_starts_from_its_self_test_and_follows_what_is_read():
    pace = Pace(1e9)
    assert pace.bytes_per_s == pytest.approx(1e9)
    for i in range(1, 21):
        pace.ended(pace.began(i), 64 * MB, i + 0.64)  # 0.1 GB/s
    assert pace.bytes_per_s == pytest.approx(64 * MB / 0.64, rel=0.1)
    assert Pace(None).bytes_per_s == pytest.approx(UNPROBED_BYTES_PER_S)


def test_batches_that_run_side_by_side_share_their_seconds():
    pace = Pace(256 * MB)
    for i in range(10):
        first, second = pace.began(i), pace.began(i)
        pace.ended(first, 64 * MB, i + 0.5)
        pace.ended(second, 64 * MB, i + 0.5)
    assert pace.bytes_per_s == pytest.approx(256 * MB, rel=0.1)
    first = pace.began(20.0)
    second = pace.began(20.25)  # 0.25 s alone, 0.25 s together, 0.25 s alone
    pace.ended(first, 512 * MB, 20.5)
    assert pace.bytes_per_s == pytest.approx(512 * MB / 0.375)
    pace.ended(second, 512 * MB, 20.75)
    assert pace.bytes_per_s == pytest.approx(512 * MB / 0.375)


def test_a_batch_that_brought_nothing_says_nothing_about_the_leg():
    pace = Pace(1e9)
    pace.ended(pace.began(0.0), 0, 100.0)
    assert pace.bytes_per_s == pytest.approx(1e9)


def test_bytes_that_wait_are_ahead_of_others_and_not_of_their_own_asker():
    pace = Pace(1e9)
    pace.submitted(300)
    pace.submitted(100)
    assert links({NVME: pace}, {})[NVME].queued_bytes == 400
    assert links({NVME: pace}, {NVME: 100})[NVME].queued_bytes == 300
    pace.left(300)
    pace.left(100)
    assert pace.link(50).queued_bytes == 0


def test_a_leg_is_stale_when_nothing_was_read_for_a_while():
    pace = Pace(1e9)
    assert pace.stale(1e6)
    began = pace.began(90.0)
    assert not pace.stale(99.0)
    pace.ended(began, 1, 100.0)
    assert not pace.stale(104.0)
    assert pace.stale(105.0)


def test_a_leg_that_was_slow_beyond_measure_is_forgiven_within_a_few_reads():
    pace = Pace(1e9)
    pace.ended(pace.began(1.0), 64 * MB, 100_000.0)
    assert pace.bytes_per_s < 1e4
    now = 100_100.0
    for _ in range(6):
        pace.ended(pace.began(now), MB, now + 0.001)
        now += 10
    assert pace.bytes_per_s > 0.5e9
