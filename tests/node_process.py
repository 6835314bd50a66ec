"""A host's and a GPU's node in a process of their own, behind two sockets."""

import sys
from pathlib import Path

from service_kit import small
from socket_link import serving

from tiered_kv.local import Local

SCRIPT = f"""
import sys
sys.path.insert(0, {__file__.rpartition("/")[0]!r})
import node_process
node_process.main(*sys.argv[1:])
"""


def main(root: str, shm: str, sockets: str) -> None:
    """Say `up <incarnation>` when both serve; end with stdin."""
    service = Local(small(Path(root), Path(shm)))
    assert service.gpu is not None
    with serving(f"{sockets}.host", service.host), serving(f"{sockets}.gpu", service.gpu):
        print("up", service.host.node.parts.incarnation, flush=True)
        sys.stdin.read()
    service.close()
