"""What the secondary tier tells vLLM about keys, and which promises it keeps for that."""

import random

import pytest

from tiered_kv.integrations.vllm.secondary_answers import Answers, Promise, Verdict

WAIT, HIT, MISS = Verdict.WAIT, Verdict.HIT, Verdict.MISS
PATIENCE = 4.0


def make():
    return Answers(PATIENCE)


def ask(answers, keys, request="r", now=0.0):
    return [answers.ask(key, request, now) for key in keys]


def promise(keys, until_s=30.0):
    return Promise(object(), keys, until_s)


def test_a_key_is_looked_up_once_however_often_it_is_asked_for():
    answers = make()
    assert ask(answers, "abc") == [WAIT] * 3
    assert ask(answers, "abc") == [WAIT] * 3
    assert ask(answers, "cd", "other") == [WAIT] * 2
    assert answers.take() == [["a", "b", "c"], ["d"]]
    assert answers.take() == []


def test_what_a_promise_holds_is_a_hit_and_the_rest_a_miss():
    answers = make()
    ask(answers, "abc")
    answers.take()
    answers.found(["a", "b", "c"], promise("ab"))
    assert ask(answers, "abc") == [HIT, HIT, MISS]
    assert answers.take() == []


def test_no_promise_is_a_miss_for_all():
    answers = make()
    ask(answers, "ab")
    answers.found("ab", None)
    assert ask(answers, "ab") == [MISS, MISS]


def test_a_promise_is_kept_until_its_keys_are_loaded():
    answers = make()
    ask(answers, "ab")
    given = promise("ab")
    answers.found("ab", given)
    assert answers.loading("ab") == [given, given]
    assert answers.over() == []
    answers.loaded(["a"], [given], {"a"})
    assert answers.over() == []
    answers.loaded(["b"], [given], {"b"})
    assert answers.over() == [given]
    assert answers.over() == []


def test_what_was_loaded_is_looked_up_anew_when_it_is_asked_for_again():
    answers = make()
    ask(answers, "a")
    given = promise("a")
    answers.found("a", given)
    answers.take()
    answers.loaded("a", answers.loading("a"), {"a"})
    assert ask(answers, "a") == [WAIT]
    assert answers.take() == [["a"]]


def test_a_load_that_failed_is_a_miss_for_as_long_as_its_request_lives():
    answers = make()
    ask(answers, "ab")
    given = promise("ab")
    answers.found("ab", given)
    answers.take()
    answers.loaded("ab", answers.loading("ab"), {"a"})
    assert answers.over() == [given]
    for _ in range(3):
        assert ask(answers, "b") == [MISS]
    assert answers.take() == []
    answers.finished("r")
    assert ask(answers, "b", "later") == [WAIT]


def test_a_load_of_a_key_that_was_never_promised_fails():
    answers = make()
    assert answers.loading("x") == [None]
    answers.loaded("x", [None], set())
    assert (len(answers), answers.over()) == (0, [])


def test_a_hit_ends_with_its_lease():
    answers = make()
    ask(answers, "a")
    given = promise("a", until_s=10.0)
    answers.found("a", given)
    answers.take()
    assert ask(answers, "a", now=9.9) == [HIT]
    assert ask(answers, "a", now=10.0) == [WAIT]
    assert answers.take() == [["a"]]
    assert answers.over() == [given]


def test_an_answer_that_does_not_come_is_a_miss_and_what_it_promised_is_given_back():
    answers = make()
    ask(answers, "a", now=1.0)
    assert ask(answers, "a", now=1.0 + PATIENCE) == [WAIT]
    assert ask(answers, "a", now=1.1 + PATIENCE) == [MISS]
    late = promise("a")
    answers.found("a", late)
    assert ask(answers, "a", now=9.0) == [MISS]
    assert answers.over() == [late]


def test_promises_end_with_the_last_request_that_heard_them():
    answers = make()
    ask(answers, "ab", "r")
    ask(answers, "a", "s")
    given = promise("ab")
    answers.found("ab", given)
    answers.finished("r")
    assert answers.over() == []
    assert ask(answers, "a", "s") == [HIT]
    answers.finished("s")
    assert answers.over() == [given]
    assert len(answers) == 0


def test_a_request_that_ends_before_its_lookup_began_is_not_looked_up():
    answers = make()
    ask(answers, "a", "r")
    ask(answers, "b", "s")
    answers.finished("r")
    assert answers.take() == [["b"]]


def test_what_is_found_for_nobody_is_given_back():
    answers = make()
    ask(answers, "a")
    answers.take()
    answers.finished("r")
    given = promise("a")
    answers.found("a", given)
    assert answers.over() == [given]


def test_a_promise_that_holds_more_than_is_asked_for_keeps_only_that():
    answers = make()
    ask(answers, "ab", "r")
    ask(answers, "b", "s")
    answers.take()
    answers.finished("r")
    first, second = promise("ab"), promise("b")
    answers.found("ab", first)
    assert answers.over() == []
    answers.found("b", second)  # the same key once more
    assert answers.over() == [second]
    answers.loaded("b", answers.loading("b"), {"b"})
    assert answers.over() == [first]


def test_clear_gives_every_promise_back():
    answers = make()
    ask(answers, "ab")
    given = promise("ab")
    answers.found("ab", given)
    answers.clear()
    assert answers.over() == [given]
    assert len(answers) == 0


@pytest.mark.parametrize("seed", range(30))
def test_every_promise_ends_exactly_once_whatever_happens(seed):
    rng = random.Random(seed)
    answers, now = make(), 0.0
    made, over, looking, loads = [], [], [], []
    live: set[str] = set()
    for step in range(600):
        now += rng.random()
        match rng.randrange(7):
            case 0 | 1:
                request = f"r{rng.randrange(5)}"
                live.add(request)
                for key in rng.sample(range(12), 4):
                    if answers.ask(key, request, now) is HIT and rng.random() < 0.7:
                        loads.append(([key], answers.loading([key])))
                        assert loads[-1][1] != [None]
            case 2:
                looking += answers.take()
            case 3 | 4 if looking:
                keys = looking.pop(rng.randrange(len(looking)))
                held = keys[: rng.randrange(len(keys) + 1)]
                given = promise(held, now + 5 * rng.random()) if held else None
                made += [given] if given else []
                answers.found(keys, given)
            case 5 if loads:
                keys, promises = loads.pop(rng.randrange(len(loads)))
                answers.loaded(keys, promises, set(keys) if rng.random() < 0.6 else set())
            case 6 if live and step % 3 == 0:
                request = rng.choice(sorted(live))
                live.remove(request)
                answers.finished(request)
        over += answers.over()
    for keys, promises in loads:
        answers.loaded(keys, promises, keys)
    answers.clear()
    over += answers.over()
    assert sorted(map(id, over)) == sorted(map(id, made))
    assert len(answers) == 0
