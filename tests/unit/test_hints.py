"""What is expected of sessions reaches the policies: what it is worth, and what it may cost."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_kit import call

from tiered_kv.errors import BadInput
from tiered_kv.hierarchy import Hierarchy, TierSpec, check
from tiered_kv.policies import EVICTION
from tiered_kv.policies.adaptive import Adaptive
from tiered_kv.policies.base import Expecting
from tiered_kv.sim.hints import Hints, told
from tiered_kv.sim.replay import OneTier, replay
from tiered_kv.sim.traces import Request
from tiered_kv.testing.policies import block_keys
from tiered_kv.types import BlockKey, Medium, Run

SIZE = 1 << 20
NEVER, SOON_S, LATE_S = math.inf, 5.0, 5000.0
Say = Callable[[int, random.Random], float]


def freely(_: BlockKey) -> bool:
    return True


def with_runs(*names: str, blocks: int = 6) -> tuple[Adaptive, list[list[BlockKey]]]:
    policy, runs = Adaptive(100), [block_keys(blocks, name) for name in names]
    for run in runs:
        policy.admit(run, ())
    return policy, runs


def test_only_policies_that_can_use_hints_are_told() -> None:
    assert {name for name in EVICTION if isinstance(EVICTION[name](8), Expecting)} == {"adaptive"}


def test_what_has_ended_leaves_first_and_from_its_tail() -> None:
    policy, (one, two) = with_runs("one", "two")
    policy.expect(two, NEVER)
    assert policy.victims(6, freely) == two[::-1]
    policy.check(one + two)
    policy.use(two)  # it is back all the same
    assert policy.victims(6, freely) == one[::-1]


def test_what_another_session_used_since_does_not_leave_with_the_one_that_ended() -> None:
    policy = Adaptive(100)
    prompt, one, two = block_keys(4, "prompt"), block_keys(4, "one"), block_keys(4, "two")
    policy.admit(prompt + one, ())
    policy.use(prompt)
    policy.admit(two, prompt)
    policy.expect(prompt + one, NEVER)
    assert policy.victims(4, freely) == one[::-1]
    assert policy.victims(5, freely)[4] == prompt[-1]  # by its age, like all others


def test_a_hint_may_name_blocks_that_are_not_here() -> None:
    policy, (one, two) = with_runs("one", "two")
    policy.remove(two[4:])
    for hint in (NEVER, 0.0, SOON_S, LATE_S):
        policy.expect(two, hint)
        policy.expect(block_keys(3, "stranger"), hint)
        policy.expect((), hint)
    policy.check(one + two[:4])


def test_a_second_hint_takes_the_place_of_the_first() -> None:
    policy, (one, two) = with_runs("one", "two")
    policy.expect(two, NEVER)
    policy.expect(two, SOON_S)
    assert policy.victims(6, freely) == one[::-1]


def sessions(requests: int, seed: int = 1) -> list[tuple[int, list[BlockKey]]]:
    """Sessions of ten blocks, with a block more each time. Those with even numbers come back soon
    and often, the others once, much later."""
    rng = random.Random(seed)
    found: list[tuple[int, list[BlockKey]]] = []
    keys: dict[int, list[BlockKey]] = {}
    queue: list[tuple[float, int, int]] = []
    for number in range(requests):
        now = float(number)
        number_of = number
        if queue and min(queue)[0] <= now:
            _, number_of, left = queue.pop(queue.index(min(queue)))
        else:
            left = 5 if number % 2 == 0 else 1
        run = keys.setdefault(number_of, block_keys(9, f"{number_of}/"))
        run.append(BlockKey(f"{number_of}/+{len(run)}".encode()))
        found.append((number_of, list(run)))
        if left:
            away = rng.uniform(20, 40) if number_of % 2 == 0 else rng.uniform(900, 1100)
            queue.append((now + away, number_of, left - 1))
    return found


def hits(requests: list[tuple[int, list[BlockKey]]], blocks: int, say: Say | None) -> float:
    """Percent of blocks; after each request the policy is told what `say` says."""
    tier, rng, found = OneTier("adaptive", blocks), random.Random(4), 0
    for i, (number, run) in enumerate(requests):
        found += tier.request(run)
        if say is not None:
            tier.hierarchy.expect(run, say(number, rng))
        if i % 1_000 == 0:
            check(tier.hierarchy)
    check(tier.hierarchy)
    return 100 * found / sum(len(run) for _, run in requests)


@pytest.fixture(scope="module")
def two_kinds() -> list[tuple[int, list[BlockKey]]]:
    return sessions(3_000)


def test_true_hints_bring_hits(two_kinds: list[tuple[int, list[BlockKey]]]) -> None:
    without = hits(two_kinds, 150, None)
    with_hints = hits(two_kinds, 150, lambda n, _: SOON_S if n % 2 == 0 else LATE_S)
    assert with_hints > without + 1.0


@pytest.mark.parametrize(
    "say",
    [
        lambda _, rng: rng.choice([0.0, 1.0, SOON_S, 60.0, 600.0, LATE_S]),
        lambda n, _: LATE_S if n % 2 == 0 else SOON_S,
        lambda n, _: NEVER if n % 2 == 0 else SOON_S,
        lambda _, rng: rng.choice([NEVER, SOON_S]),
        lambda n, _: NEVER,
    ],
    ids=["by chance", "reversed", "those that return have ended", "ended by chance", "all ended"],
)
def test_wrong_hints_are_found_out(two_kinds: list[tuple[int, list[BlockKey]]], say: Say) -> None:
    assert hits(two_kinds, 150, say) >= hits(two_kinds, 150, None) - 1.5


def two_tiers(policy: str) -> Hierarchy:
    return Hierarchy([
        TierSpec(Medium.DRAM, 8 * SIZE, SIZE, high=1.0, low=1.0, policy=policy),
        TierSpec(Medium.NVME, 8 * SIZE, SIZE, high=1.0, low=1.0, policy=policy),
    ])  # fmt: skip


@pytest.mark.parametrize("policy", ["adaptive", "lru"])
def test_the_hierarchy_tells_every_tier_and_moves_nothing(policy: str) -> None:
    hierarchy, run = two_tiers(policy), block_keys(5)
    for hint in (NEVER, 0.0, 12.5):
        hierarchy.expect(run, hint)
    assert hierarchy.due(0.0) == []
    check(hierarchy)


@pytest.mark.parametrize("wrong", [-1.0, -math.inf, math.nan])
def test_what_is_no_time_is_refused_by_its_name(wrong: float) -> None:
    with pytest.raises(BadInput, match=f"return_s must be 0 or more, not {wrong}"):
        two_tiers("adaptive").expect(block_keys(5), wrong)


class Listening(Hierarchy):
    """Writes down what it is told."""

    def __init__(self) -> None:
        super().__init__([TierSpec(Medium.DRAM, 8 * SIZE, SIZE)])
        self.heard: list[tuple[Run, float]] = []

    def expect(self, run: Run, return_s: float) -> None:
        self.heard.append((run, return_s))


def heard_by(*requests: Request) -> list[list[Run]]:
    """What had been told when each of the requests began."""
    listening = Listening()
    runs = told(requests, Hints(listening))
    return [[run for run, _ in listening.heard] for _ in runs]


def test_nothing_is_told_before_an_engine_would_know_it() -> None:
    one, two, three = (tuple(block_keys(2, name)) for name in ("one", "two", "three"))
    assert heard_by(
        Request(0.0, one, "a", "tool_use", 10.0),
        Request(5.0, two, "b", "end_turn", 6.0),
        Request(9.0, three, "c", "end_turn", 20.0),
        Request(11.0, three, "d", "end_turn", 20.0),
    ) == [[], [], [two], [two, one]]


def test_a_session_that_is_back_already_is_not_told_of() -> None:
    one, two = tuple(block_keys(2, "one")), tuple(block_keys(3, "one"))
    assert heard_by(
        Request(0.0, one, "a", "tool_use", 10.0),
        Request(5.0, two, "a", "end_turn", 30.0),
        Request(20.0, one, "b", "end_turn", 25.0),
        Request(99.0, one, "", "", 0.0),
    ) == [[], [], [], [one, two]]


def test_stop_reasons_are_learned_as_they_come() -> None:
    listening = Listening()
    run = tuple(block_keys(2))
    requests = [Request(100.0 * i, run, "a", "tool_use", 100.0 * i + 1) for i in range(200)]
    list(told(requests, Hints(listening)))
    expected = [return_s for _, return_s in listening.heard]
    assert expected[0] == pytest.approx(9.0, rel=0.2)  # what is expected of tools at first
    assert expected[-1] == pytest.approx(99.0, rel=0.2)


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    """Two coding sessions that take turns."""
    requests = [
        [10.0 * i, 0, 0, 0.0, 1.0, "tool_use" if i % 3 else "end_turn", "m", [[1, 16 + 8 * i]]]
        for i in range(12)
    ]
    lines = [
        {"id": name, "start_s": float(i), "bs": 64, "tool": 512, "sys": 0, "reqs": requests}
        for i, name in enumerate("ab")
    ]
    file = tmp_path / "two.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_the_command_shows_a_policy_with_hints_beside_it_without(agents: Path) -> None:
    out = agents.with_suffix(".json")
    done = call("replay", str(agents), "--format", "claude-code", "--policy", "lru,adaptive",
                "--blocks", "5,20", "--hints", "--jobs", "1", "--json", str(out))  # fmt: skip
    assert done.code == 0, done
    found = [result["name"] for result in json.loads(out.read_text())["results"]]
    assert found == [
        f"replay/two/{policy}/{blocks}"
        for policy in ("lru", "adaptive", "adaptive+hints")
        for blocks in (5, 20)
    ]


def test_hints_from_a_trace_without_any_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n')
    ended = call("replay", str(file), "--policy", "adaptive", "--hints")
    assert "a mooncake trace has no stop reasons; claude-code has" in ended.failed()


def test_replaying_without_hints_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hierarchy, "expect", lambda *_: pytest.fail("told"))
    assert replay([block_keys(3)] * 3, "adaptive", 10).hits == 6
