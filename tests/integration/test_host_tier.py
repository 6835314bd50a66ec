"""The host as a GPU's lower tier: half-done copies, restarts and timeouts leave nothing behind."""

import itertools
import random

import pytest
from service_kit import LAYOUT, LONG_S, Hooked, at_rest, content, folders, pending, small, until
from service_kit import Revived as Host

from tiered_kv import assemble, liveness
from tiered_kv.errors import BadLayout, StaleHandle, TierBroken, Unreachable
from tiered_kv.layout import KVLayout
from tiered_kv.tiers.hbm import HbmPool
from tiered_kv.tiers.host import HostTier
from tiered_kv.types import BlockKey, Done, Failed, Located, Medium, Why

NBYTES = LAYOUT.block_bytes
SLOTS = 48
COUNT = itertools.count()


class Rig:
    """A `HostTier` above a real node of a host, and a pool of 48 slots."""

    def __init__(self, root, shm, **sections):
        self.config = small(root, shm, **sections)
        self.host = Host(lambda: assemble.host(self.config))
        self.link = Hooked(self.host)
        self.alive = liveness.hold(shm, "gpu-x")
        self.pool = HbmPool.create(
            shm, "gpu-x-1", SLOTS * NBYTES, node_id="gpu-x", incarnation=1, device="cpu"
        )
        self.tier = HostTier(self.link, self.pool, "gpu-x", 1.0, LONG_S)
        self.tier.introduce(LAYOUT)

    def view(self, i):
        return self.pool.tensor[i * NBYTES : (i + 1) * NBYTES].numpy()

    def blocks(self, n, checksums=None):
        """A new run of `n` blocks whose bytes lie in the first slots of the pool."""
        seed = next(COUNT)
        keys = [BlockKey(random.Random(f"{seed} {i}").randbytes(16)) for i in range(n)]
        for i, key in enumerate(keys[:SLOTS]):
            self.view(i)[:] = memoryview(content(key))
        return [
            Located(key, parent, i % SLOTS * NBYTES, NBYTES, LAYOUT.fingerprint)
            for i, (key, parent) in enumerate(zip(keys, [None, *keys], strict=False))
        ]

    def write(self, blocks):
        return self.tier.write(blocks, [b.slot for b in blocks])

    def read(self, blocks):
        """The outcomes; every block that arrived has its own bytes."""
        self.pool.tensor.zero_()
        targets = [i * NBYTES for i in range(len(blocks))]
        outcomes = self.tier.read(blocks, targets)
        for i, (block, outcome) in enumerate(zip(blocks, outcomes, strict=True)):
            if isinstance(outcome, Done):
                assert bytes(self.view(i)) == content(block.key)
        return outcomes

    def call(self, verb, *args):
        return self.host.call(verb, *args, timeout_s=LONG_S)

    def reservations(self):
        return pending(self.host)["reservations"]

    def leases(self):
        return pending(self.host)["leases"]

    def close(self):
        self.tier.close()
        self.pool.close()
        self.alive.close()
        self.host.stop(flush=False)


@pytest.fixture
def rig():
    with folders() as (root, shm):
        rig = Rig(root, shm)
        yield rig
        if rig.host.runner is not None:
            at_rest(rig.host)
        rig.close()


def fail_with(error):
    def fail(_):
        raise error

    return fail


def whys(outcomes):
    return [o.why if isinstance(o, Failed) else None for o in outcomes]


def test_blocks_go_down_and_come_back_in_two_calls_each(rig):
    blocks = rig.blocks(5)
    rig.link.verbs.clear()
    sealed = rig.write(blocks)
    assert whys(sealed) == [None] * 5
    assert rig.link.verbs == ["reserve", "commit"]
    rig.link.verbs.clear()
    outcomes = rig.read(blocks)
    assert rig.link.verbs == ["fetch", "release"]
    assert [o.checksum for o in outcomes] == [o.checksum for o in sealed]
    assert [o.source for o in outcomes] == [Medium.DRAM] * 5


def test_what_the_host_holds_is_not_copied_again(rig):
    blocks = rig.blocks(4)
    rig.write(blocks[:2])
    assert [o.copied for o in rig.write(blocks)] == [False, False, True, True]
    assert [o.copied for o in rig.write(blocks)] == [False] * 4


def test_what_the_host_lacks_is_a_miss_behind_what_it_has(rig):
    blocks = rig.blocks(4)
    rig.write(blocks[:2])
    assert whys(rig.read(blocks)) == [None, None, Why.ABSENT, Why.ABSENT]
    assert whys(rig.read(rig.blocks(2))) == [Why.ABSENT] * 2


def test_a_block_whose_checksum_is_known_and_not_sampled_reaches_the_host(rig):
    blocks = rig.blocks(6)
    sums = [o.checksum for o in rig.write(blocks)]
    rig.call("forget", [b.key for b in blocks])
    rig.tier.close()
    rig.tier = HostTier(rig.link, rig.pool, "gpu-x", 0.0, LONG_S)  # compares none
    rig.tier.introduce(LAYOUT)
    for i, block in enumerate(blocks):
        rig.view(i)[:] = memoryview(content(block.key))
    outcomes = rig.write([b._replace(checksum=c) for b, c in zip(blocks, sums, strict=True)])
    assert [(o.copied, o.checksum) for o in outcomes] == [(True, c) for c in sums]
    assert whys(rig.read(blocks)) == [None] * 6


def test_a_copy_that_fails_halfway_commits_what_is_whole_and_nothing_behind_it(rig):
    blocks = rig.blocks(4)
    wrong = [b if i != 2 else b._replace(checksum=1) for i, b in enumerate(blocks)]
    assert whys(rig.write(wrong)) == [None, None, Why.CORRUPT, Why.ORPHANED]
    assert rig.reservations() == 0
    assert whys(rig.read(blocks)) == [None, None, Why.ABSENT, Why.ABSENT]


def test_a_copy_that_raises_leaves_no_reservation(rig, monkeypatch):
    blocks = rig.blocks(3)
    leg = rig.tier._attached.leg
    monkeypatch.setattr(leg, "write", lambda *_: fail_with(ZeroDivisionError("x"))(0))
    with pytest.raises(ZeroDivisionError):
        rig.write(blocks)
    assert rig.reservations() == 0
    assert whys(rig.read(blocks)) == [Why.ABSENT] * 3


def test_a_commit_that_is_not_answered_leaves_no_reservation_once_the_host_answers(rig):
    blocks = rig.blocks(3)
    rig.link.before["commit"] = fail_with(Unreachable("lost on the way"))
    with pytest.raises(Unreachable):
        rig.write(blocks)
    assert rig.reservations() == 1  # nobody could tell the host yet
    del rig.link.before["commit"]
    assert whys(rig.write(rig.blocks(2))) == [None, None]
    assert rig.reservations() == 0


def test_a_commit_whose_answer_is_lost_is_held_and_owes_nothing(rig):
    blocks = rig.blocks(3)
    rig.link.after["commit"] = fail_with(Unreachable("the answer was lost"))
    with pytest.raises(Unreachable):
        rig.write(blocks)
    del rig.link.after["commit"]
    assert [o.copied for o in rig.write(blocks)] == [False] * 3
    assert rig.reservations() == 0


def test_a_release_that_is_not_answered_does_not_spoil_the_copy(rig):
    blocks = rig.blocks(3)
    rig.write(blocks)
    rig.link.before["release"] = fail_with(Unreachable("lost"))
    assert whys(rig.read(blocks)) == [None] * 3
    assert rig.leases() == 1
    inside_expire(rig)


def inside_expire(rig):
    """Time passes at the host."""
    from service_kit import inside

    inside(rig.host, lambda node: node.hierarchy.due(node._now() + 1e6))


def test_a_copy_up_that_raises_leaves_no_lease(rig, monkeypatch):
    blocks = rig.blocks(3)
    rig.write(blocks)
    leg = rig.tier._attached.leg
    monkeypatch.setattr(leg, "read", lambda *_: fail_with(ZeroDivisionError("x"))(0))
    with pytest.raises(ZeroDivisionError):
        rig.read(blocks)
    assert rig.leases() == 0


def test_bytes_whose_lease_lapsed_during_the_copy_are_a_miss(rig):
    blocks = rig.blocks(3)
    rig.write(blocks)

    def reuse(fetched):
        rig.host.node.parts.pool.generations.open(fetched.lease.slots[1:2])

    rig.link.after["fetch"] = reuse
    assert whys(rig.read(blocks)) == [Why.LAPSED] * 3
    assert rig.leases() == 0
    # the slot belongs to a committed block again, as far as this test is concerned
    rig.host.node.parts.pool.generations.publish(
        [b.slots[0] for b in rig.host.node.hierarchy.book.live([blocks[1].key])]
    )


@pytest.mark.parametrize("lower", [True, False], ids=["with a lower copy", "without one"])
def test_bytes_that_prove_wrong_are_given_to_nobody_else(rig, lower):
    blocks = rig.blocks(4)
    rig.write(blocks)
    if lower:
        assert rig.call("persist", [b.key for b in blocks]) == 4
    slot = rig.host.node.hierarchy.book.blocks[blocks[2].key].slots[0]
    rig.host.node.parts.pool.view(slot, NBYTES)[100] ^= 1
    outcomes = rig.read(blocks)
    assert whys(outcomes)[:3] == [None, None, Why.CORRUPT]
    careless = HostTier(rig.link, rig.pool, "gpu-x", 0.0, LONG_S)  # compares none
    careless.introduce(LAYOUT)
    rig.tier.close()
    rig.tier = careless
    wanted = [None] * 4 if lower else [None, None, Why.ABSENT, Why.ABSENT]
    assert whys(rig.read(blocks)) == wanted


def test_a_restarted_host_is_joined_at_the_next_call(rig):
    blocks = rig.blocks(4)
    rig.write(blocks)
    rig.host.stop()
    with pytest.raises(Unreachable):
        rig.read(blocks)
    rig.host.start()
    outcomes = rig.read(blocks)
    assert whys(outcomes) == [None] * 4
    assert {o.source for o in outcomes} == {Medium.NVME}
    assert whys(rig.write(rig.blocks(2))) == [None] * 2


@pytest.mark.parametrize("known", [True, False], ids=["layout known", "layout unknown"])
def test_slots_of_the_next_life_are_never_taken_for_those_of_the_mapped_arena(rig, known):
    """The host restarts between the look at its arena and the call, and answers."""
    old, new = rig.blocks(3), None
    rig.write(old)
    restarts = []

    def restart(_):
        if not restarts:
            restarts.append(1)
            rig.host.stop()
            rig.host.start()
            if known:
                rig.call("hello", LAYOUT)

    rig.link.before["fetch"] = restart
    with pytest.raises(Unreachable, match="restarted"):
        rig.read(old)
    assert rig.leases() == 0
    assert whys(rig.read(old)) == [None] * 3
    restarts.clear()
    rig.link.before["reserve"] = restart
    new = rig.blocks(3)
    with pytest.raises(Unreachable, match="restarted"):
        rig.write(new)
    assert rig.reservations() == 0
    assert whys(rig.read(new)) == [Why.ABSENT] * 3
    for i, block in enumerate(new):
        rig.view(i)[:] = memoryview(content(block.key))
    assert whys(rig.write(new)) == [None] * 3
    assert whys(rig.read(new)) == [None] * 3


def test_a_host_that_restarts_during_a_copy_fails_the_batch_and_holds_nothing_of_it(rig):
    blocks = rig.blocks(3)

    def restart(_):
        rig.link.after.clear()
        rig.host.stop()
        rig.host.start()

    rig.link.after["reserve"] = restart
    with pytest.raises(Unreachable, match="restarted during a copy"):
        rig.write(blocks)
    assert rig.reservations() == 0
    assert whys(rig.write(blocks)) == [None] * 3


def test_a_wiped_host_that_counts_its_lives_from_one_again_is_another_host(rig):
    blocks = rig.blocks(2)
    rig.write(blocks)
    first = rig.host.node.parts.incarnation
    rig.host.stop()
    for file in rig.config.nvme_folder.iterdir():
        file.unlink()
    rig.host.start()
    assert rig.host.node.parts.incarnation == first == 1
    assert whys(rig.read(blocks)) == [Why.ABSENT] * 2
    assert whys(rig.write(rig.blocks(2))) == [None] * 2
    with pytest.raises(StaleHandle):
        rig.call("abort", first << 40 | 1)


def test_more_than_the_hosts_memory_holds_goes_down_and_comes_up_in_parts(rig):
    blocks = rig.blocks(SLOTS)  # the host's memory has 32 slots
    assert whys(rig.write(blocks)) == [None] * SLOTS
    assert whys(rig.read(blocks)) == [None] * SLOTS


def test_a_block_whose_parent_the_host_lacks_is_not_given_up_here(rig):
    blocks = rig.blocks(3)
    outcomes = rig.write(blocks[1:])
    assert whys(outcomes) == [Why.ORPHANED] * 2
    assert rig.reservations() == 0


def test_a_block_that_another_engine_committed_meanwhile_counts_as_held(rig):
    blocks = rig.blocks(2)
    other = HostTier(rig.host, rig.pool, "gpu-x", 1.0, LONG_S)
    other.introduce(LAYOUT)

    def meanwhile(_):
        rig.link.before.clear()
        assert whys(other.write(blocks, [b.slot for b in blocks])) == [None] * 2

    rig.link.before["commit"] = meanwhile
    assert whys(rig.write(blocks)) == [None] * 2
    assert whys(rig.read(blocks)) == [None] * 2
    other.close()


def test_a_layout_that_the_host_refuses_spoils_no_later_rejoin(rig):
    wide = KVLayout("kit", "float16", layers=64, kv_heads=8, head_dim=128, block_tokens=256)
    with pytest.raises(BadLayout, match=f"a block of {wide.block_bytes} bytes does not fit"):
        rig.tier.introduce(wide)
    rig.host.stop()
    rig.host.start()
    assert whys(rig.write(rig.blocks(1))) == [None]


def test_asking_for_blocks_of_another_layout_is_a_miss_and_not_a_broken_host(rig):
    blocks = rig.blocks(2)
    rig.write(blocks)
    twin = KVLayout("kit", "bfloat16", layers=4, kv_heads=2, head_dim=64, block_tokens=32)
    rig.tier.introduce(twin)
    outcomes = rig.read([b._replace(layout=twin.fingerprint) for b in blocks])
    assert whys(outcomes) == [Why.ABSENT] * 2
    assert LAYOUT.fingerprint.hex() in outcomes[0].detail
    assert whys(rig.read(blocks)) == [None] * 2


def test_a_host_that_is_away_is_joined_by_the_probe_when_it_is_back(rig):
    rig.host.stop()
    with pytest.raises(Unreachable):
        rig.tier.probe()
    rig.host.start()
    assert rig.tier.probe().read_bytes_per_s > 0


def test_without_a_layout_there_is_nothing_to_join(rig):
    lone = HostTier(rig.link, rig.pool, "gpu-x", 1.0, LONG_S)
    with pytest.raises(TierBroken, match="no layout was introduced"):
        lone.read(rig.blocks(1), [0])


def test_a_closed_tier_maps_nothing_any_more(rig):
    rig.tier.close()
    rig.tier.close()
    with pytest.raises(TierBroken, match="closed"):
        rig.read(rig.blocks(1))
    assert rig.tier._attached is None


def test_a_host_without_room_says_so_and_the_blocks_stay(rig):
    held = [rig.call("fetch", LAYOUT.fingerprint, [b.key for b in some]) for some in fill_up(rig)]
    rig.host.node.config = small(
        rig.config.nvme_folder.parent, rig.config.shm_folder, service={"store_deadline_s": 0.1}
    )
    blocks = rig.blocks(2)
    assert whys(rig.write(blocks)) == [Why.FULL] * 2
    assert rig.reservations() == 0
    for fetched in held:
        rig.call("release", fetched.lease.id)
    until(lambda: whys(rig.write(rig.blocks(2))) == [None] * 2, "room again")


def fill_up(rig):
    """Runs that take all of the host's memory."""
    for _ in range(4):
        some = rig.blocks(8)
        assert whys(rig.write(some)) == [None] * 8
        yield some
