"""kill -9 of Ray itself under an embedded service: all of it ends, and the next start is warm."""

from pathlib import Path

import psutil
import pytest
from cluster_kit import CALL_S, Engine, config_in, embedded, folders, until
from other_process import Child

pytestmark = pytest.mark.timeout(400)

SERVICE = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from cluster_kit import Engine, config_in, environment, node_status
from tiered_kv import connecting
root, shm = Path(sys.argv[1]), Path(sys.argv[2])
with environment(root):
    cluster = connecting.connect(config_in(root, shm), embedded=True)
    engine = Engine(cluster.link(cluster.place("kept")))
    print(engine.save("kept", 15, durable=True).durable, node_status(cluster)["process"]["pid"],
          flush=True)
    sys.stdin.readline()
"""


def still_there(processes):
    """Those of ours, and of Ray those that hold anything: its agents look for their raylet only
    once a minute."""
    _, alive = psutil.wait_procs(processes, timeout=0)
    names = []
    for process in alive:
        try:
            names.append(" ".join(process.cmdline()).strip()[:80])
        except (psutil.ZombieProcess, psutil.NoSuchProcess):
            continue  # ended; nobody has read its exit status yet
    return [name for name in names if not name.endswith("Agent")]


@pytest.mark.parametrize("victim", ["raylet", "driver"])
def test_everything_ends_with_what_was_killed_and_the_next_start_is_warm(victim):
    with folders() as (root, shm):
        with Child(SERVICE, root, shm) as child:
            durable, pid = map(int, child.word().split())
            assert durable == 15
            node = psutil.Process(pid)
            raylet = node.parent()
            started = psutil.Process(child._process.pid).children(recursive=True)
            assert node in started
            if victim == "raylet":
                assert "raylet" in raylet.name()
                raylet.kill()
                psutil.wait_procs([node], timeout=CALL_S * 3)
                assert not node.is_running()
            else:
                child.kill()
                until(lambda: still_there(started) == [], "all have ended")
        with embedded(config_in(root, shm), root) as cluster:
            engine = Engine(cluster.link(cluster.place("kept")))
            assert cluster.place("kept").kept
            got = engine.wake("kept")
            assert (got.blocks, got.missed) == (15, 0)
            assert len(list(shm.glob("*.arena"))) == 2  # of this life only: DRAM and the stand-in
            engine.close()
