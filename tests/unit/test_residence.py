"""What a node tells routers of a session: how much is here, where, and how soon it could be up."""

import pytest
from service_kit import LAYOUT, LONG_S, Speaker, service, tokens, until

from tiered_kv.actors.fleet import RayNode
from tiered_kv.client import Client
from tiered_kv.errors import BadSession, UnknownSession
from tiered_kv.integrations.ray_serve.companion import serving_config
from tiered_kv.residence import Residence
from tiered_kv.settings import load
from tiered_kv.types import Medium

N = 4 * LAYOUT.block_tokens + 5


def test_a_session_is_found_where_it_sleeps_with_the_time_to_bring_it_up() -> None:
    with service(gpu=False) as one:
        speaker = Speaker(Client(one))
        speaker.save("s", tokens("s", N))

        def held() -> Residence:
            answer = one.to_host.call("resident", "s", timeout_s=LONG_S)
            assert isinstance(answer, Residence)
            return answer

        assert held() == Residence(N, N, {Medium.DRAM: 5}, 0.0)
        for i in range(12):  # push it out of DRAM, which holds 32 blocks
            speaker.save(f"other-{i}", tokens(f"other-{i}", N))
        until(lambda: held().blocks.get(Medium.NVME) == 5, "all of it is on NVMe only")
        assert held().tokens == N
        assert held().bring_s > 0


def test_a_session_that_nobody_saved_is_unknown() -> None:
    with service(gpu=False) as one:
        with pytest.raises(UnknownSession):
            one.to_host.call("resident", "nobody", timeout_s=LONG_S)
        with pytest.raises(BadSession):
            one.to_host.call("resident", "no name", timeout_s=LONG_S)


def test_a_service_for_engines_leaves_the_gpus_to_them() -> None:
    node = RayNode("abc", "host", {"CPU": 8.0, "GPU": 2.0})
    assert node.gpus_with(load()) == ["gpu-abc-0", "gpu-abc-1"]
    assert serving_config().hbm.bytes == 0
    assert node.gpus_with(serving_config()) == []
