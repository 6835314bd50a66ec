"""What `RayLink` decides by itself; the rest needs actors: tests/integration/test_actors.py."""

import pytest

from tiered_kv.errors import Unreachable
from tiered_kv.raylink import HEALTH, IO, RayLink, group_of
from tiered_kv.runner import VERBS


def test_a_process_that_has_not_joined_ray_is_told_so_and_starts_no_cluster():
    import ray

    assert not ray.is_initialized()
    with pytest.raises(Unreachable, match="node-1: this process has not joined Ray"):
        RayLink("node-1", "tiered_kv").call("ping", timeout_s=1.0)
    assert not ray.is_initialized()


def test_what_an_operator_asks_never_shares_a_queue_with_what_waits_for_media():
    assert {group_of(verb) for verb in ("ping", "about", "status", "list_sessions")} == {"health"}
    assert not HEALTH & IO
    assert group_of("wake") == "io"


def test_ending_a_lease_or_reservation_never_waits_behind_media():
    assert {group_of(verb) for verb in ("release", "abort", "hello", "lookup")} == {"control"}


def test_every_verb_named_here_exists():
    assert IO <= VERBS
    assert HEALTH - {"ping", "about"} <= VERBS
