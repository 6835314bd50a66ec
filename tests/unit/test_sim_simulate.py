from collections.abc import Iterator
from dataclasses import replace

import pytest

from tiered_kv.errors import BadInput
from tiered_kv.policies.load_or_recompute import Hit, Prefill, modelled_s
from tiered_kv.sim import models, profiles
from tiered_kv.sim.clock import Clock
from tiered_kv.sim.description import Workload
from tiered_kv.sim.machine import Machine, Setup
from tiered_kv.sim.profiles import Profile
from tiered_kv.sim.simulate import Outcome, idle_wake_s, percentile, simulate
from tiered_kv.sim.workload import generate
from tiered_kv.types import Medium

MODEL = models.model("llama-3.1-70b")
PROFILE = profiles.load("designed-for")
BOTH = (Medium.DRAM, Medium.NVME)
SMALL = Workload(sessions=40, tool_share=1.0)


def smaller(profile: Profile = PROFILE, hbm: float = 24e9, dram: float = 100e9) -> Profile:
    """The reference node with a small part of its memory, so that few sessions fill it."""
    assert profile.nvme is not None
    assert profile.remote is not None
    return replace(
        profile,
        gpu=replace(profile.gpu, hbm_bytes=hbm),
        dram=replace(profile.dram, bytes=dram),
        nvme=replace(profile.nvme, bytes=120e9),
        remote=replace(profile.remote, bytes=60e9),
    )


def run(setup: Setup, work: Workload = SMALL, **given: float) -> Outcome:
    return simulate(setup, work, **{"warm_s": 120.0, "window_s": 240.0, **given})  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_outcome_and_another_seed_another() -> None:
    setup = Setup(smaller(), MODEL, tiers=BOTH)
    assert run(setup) == run(setup)
    assert run(setup) != run(setup, seed=2)


def test_every_session_is_held_where_the_tiers_have_room_for_all() -> None:
    outcome = run(Setup(PROFILE, MODEL, tiers=BOTH))
    assert outcome.held == 40
    assert outcome.ooms == 0
    assert outcome.hit_share > 0.9


def test_more_tiers_hold_more_sessions_and_recompute_less() -> None:
    by_tiers = [run(Setup(smaller(), MODEL, tiers=tiers)) for tiers in ((), (Medium.DRAM,), BOTH)]
    held = [outcome.held for outcome in by_tiers]
    hits = [outcome.hit_share for outcome in by_tiers]
    assert held == sorted(set(held))
    assert hits == sorted(hits)


def test_shelves_hold_what_leaves_the_node() -> None:
    node = Setup(smaller(dram=60e9), MODEL, tiers=BOTH)
    work = replace(SMALL, tool_share=0.5)
    alone = run(node, work, window_s=900.0)
    shelved = run(replace(node, shelves=("remote", "s3")), work, window_s=900.0)
    assert shelved.held_mean > alone.held_mean + 2
    assert {name for name, _ in shelved.wakes} & {"remote", "s3"}
    assert shelved.samples[-1].used_bytes["remote"] <= 60e9


def test_a_server_without_admission_runs_out_of_memory_and_starts_again() -> None:
    naive = run(Setup(smaller(), MODEL, tiers=(), admission=False), window_s=600.0)
    assert naive.ooms > 1
    assert naive.held < 10
    assert run(Setup(smaller(), MODEL, tiers=())).ooms == 0


def test_blocks_and_moves_leave_the_hierarchy_consistent() -> None:
    from tiered_kv.hierarchy.verify import check
    from tiered_kv.sim.chats import Chats
    from tiered_kv.sim.serving import Server

    clock = Clock()
    server = Server(clock, Setup(smaller(), MODEL, tiers=BOTH))
    Chats(server, SMALL, 1, 60.0)
    for until in range(30, 241, 30):
        clock.run(float(until))
        check(server.machine.hierarchy)


@pytest.mark.parametrize(("medium", "published_ms"), [(Medium.DRAM, 41.8), (Medium.NVME, 95.7)])
def test_an_8k_sequence_wakes_as_fast_as_published(medium: Medium, published_ms: float) -> None:
    wake_ms = 1e3 * idle_wake_s(Setup(PROFILE, MODEL), 8192, medium)
    assert wake_ms == pytest.approx(published_ms, rel=0.03)


@pytest.mark.parametrize("medium", BOTH)
def test_an_idle_wake_takes_as_long_as_the_decision_expects(medium: Medium) -> None:
    setup = Setup(PROFILE, MODEL)
    machine = Machine(Clock(), setup)
    link = machine.traffic.link(*machine.path(medium, True))
    hit = Hit(16, setup.block_tokens, setup.block_bytes, new_tokens=0)
    expected = modelled_s(16, hit, [link], Prefill(0.0))
    assert idle_wake_s(setup, 16 * setup.block_tokens, medium) == pytest.approx(expected, rel=1e-3)


def test_loading_is_chosen_only_where_it_is_faster_than_recomputing() -> None:
    assert PROFILE.nvme is not None
    slow = replace(smaller(), nvme=replace(smaller().nvme, read_bytes_per_s=0.2e9))  # type: ignore[type-var]
    setup, work = Setup(slow, MODEL, tiers=BOTH), replace(SMALL, sessions=20)
    chosen, loading = run(setup, work), run(setup, work, choose=False)
    # What is loaded all the same is short: the end of a session, or while the GPUs are busy.
    loaded = [seconds for name, seconds in chosen.wakes if name is Medium.NVME]
    assert len(loaded) * 5 < chosen.chosen_recompute
    assert any(name is Medium.DRAM for name, _ in chosen.wakes)  # the part that is worth it
    whole_s = 8192 * MODEL.kv_bytes / 0.2e9
    assert all(seconds < whole_s / 4 for seconds in loaded)
    assert len(chosen.ttft_s) > 5 * len(loading.ttft_s)
    assert percentile(chosen.ttft_s, 0.99) < percentile(loading.ttft_s, 0.01)


def test_a_generated_workload_is_served_as_a_trace() -> None:
    setup = Setup(PROFILE, MODEL, tiers=BOTH)
    outcome = simulate(setup, generate("chat", 30, seed=3), warm_s=0.0, window_s=900.0)
    assert outcome.sessions == 0
    assert len(outcome.ttft_s) > 20
    assert outcome.hit_share > 0


def test_a_trace_needs_its_own_block_size() -> None:
    setup = Setup(PROFILE, MODEL, block_tokens=256)
    with pytest.raises(BadInput, match="block_tokens = 256"):
        simulate(setup, iter(()))


def test_weights_that_fill_hbm_are_refused_with_both_sizes() -> None:
    with pytest.raises(BadInput, match=r"812 GB of weights.*640 GB"):
        simulate(Setup(PROFILE, models.model("llama-3.1-405b")), SMALL)


def test_a_session_that_exceeds_hbm_is_refused() -> None:
    with pytest.raises(BadInput, match="exceeds"):
        simulate(Setup(smaller(hbm=20.2e9), MODEL), SMALL)


def bad() -> Iterator[tuple[dict[str, object], str]]:
    yield {"sessions": 0}, "sessions = 0"
    yield {"sessions": -5}, "sessions = -5"
    yield {"output_tokens": 1.5}, "output_tokens = 1.5"
    yield {"end_tokens": 8300}, "end_tokens = 8300"
    yield {"tool_share": 1.2}, "tool_share = 1.2"
    yield {"turn_p50_s": -1.0}, "turn_p50_s = -1.0"
    yield {"tool_p90_s": float("nan")}, "tool_p90_s = nan"


@pytest.mark.parametrize(("fields", "says"), list(bad()))
def test_an_impossible_workload_names_field_and_value(fields: dict[str, object], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        Workload(**{"sessions": 8, **fields})  # type: ignore[arg-type]


def test_negative_times_are_refused() -> None:
    with pytest.raises(BadInput, match="window_s = -1"):
        simulate(Setup(PROFILE, MODEL), SMALL, window_s=-1.0)
