"""Our service in a process of its own, for `bench engine`: a Ray cluster that ends with it.

It can push everybody's blocks out of DRAM, as other sessions would: by saving sessions of its own.
"""

import uuid
from typing import TYPE_CHECKING

from tiered_kv.bench.engine_pipe import serve

if TYPE_CHECKING:
    import torch

    from tiered_kv.client import Client

SAVED_TOKENS = 16
"""Blocks of a session that pushes others out."""


class Host:
    """The verbs of the process."""

    def __init__(self) -> None:
        self._client: Client | None = None

    def start(self) -> str:
        """Start it as the environment configures it; the address of its Ray cluster."""
        from tiered_kv.client import Client
        from tiered_kv.connecting import connect
        from tiered_kv.settings import load

        self._client = Client(connect(load(), embedded=True))
        import ray

        return str(ray.get_runtime_context().gcs_address)

    def push_out(self, layers: int, kv_heads: int, head_dim: int, block_tokens: int) -> int:
        """Save new sessions, a quarter more bytes than DRAM has, and forget them: what was there
        before is on NVMe only. Bytes saved. Blocks of the given size, so that no slab changes its
        cut."""
        from tiered_kv.layout import KVLayout

        client = self._kv
        layout = KVLayout("filler", "bfloat16", layers, kv_heads, head_dim,
                          block_tokens=block_tokens)  # fmt: skip
        wanted, saved = client.config.dram.bytes * 5 // 4, 0
        names = []
        while saved < wanted:
            name = f"filler-{uuid.uuid4().hex}"
            seed = uuid.uuid4().int % (1 << 31)
            tokens = [(seed + i) % (1 << 31) for i in range(SAVED_TOKENS * block_tokens)]
            done = client.save(name, layout, tokens, _fill)
            if done.why is not None:
                raise RuntimeError(f"a session of {SAVED_TOKENS} blocks was not saved: {done.why}")
            saved += SAVED_TOKENS * layout.block_bytes
            names.append(name)
        for name in names:
            client.forget(name)
        return saved

    def bytes_from_nvme(self) -> int:
        """Bytes that were brought from NVMe into DRAM so far."""
        legs = [leg for node in self._kv.nodes() for leg in node["moves"]]
        return sum(leg["bytes"] for leg in legs if leg["from"] == "nvme" and leg["to"] == "dram")

    def close(self) -> None:
        """Stop the service and its Ray cluster."""
        if self._client is not None:
            self._client.close()

    @property
    def _kv(self) -> "Client":
        if self._client is None:
            raise RuntimeError("the service was not started")
        return self._client


def _fill(index: int, _tokens: int, slot: "torch.Tensor") -> None:
    slot.fill_(index & 0x7F)


def main() -> None:
    """Until the parent says stop, or is gone."""
    host = Host()
    try:
        serve(
            {
                "start": host.start,
                "push_out": host.push_out,
                "bytes_from_nvme": host.bytes_from_nvme,
            }
        )
    finally:
        host.close()


if __name__ == "__main__":
    main()
