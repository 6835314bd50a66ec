"""The whole service inside one process, without Ray: for tools, tests and small engines."""

from typing import Any

from tiered_kv import assemble
from tiered_kv.client import Client
from tiered_kv.config import Config
from tiered_kv.runner import Runner


class Local:
    """A host's node and, unless `gpu` is False, a GPU's node above it, each on its own loop.

    Satisfies `client.Directory`. Raises what `assemble` raises; nothing runs then.
    """

    def __init__(self, config: Config, gpu: bool = True) -> None:
        self.config = config
        self.host = Runner(lambda: assemble.host(config))
        self.gpu: Runner | None = None
        if gpu:
            try:
                self.gpu = Runner(lambda: assemble.gpu(config, self.host))
            except BaseException:
                self.host.stop()
                raise

    def link_for(self, session: str) -> Runner:
        """The GPU's node if there is one, else the host's."""
        return self.gpu or self.host

    def nodes(self) -> list[dict[str, Any]]:
        """The status of both."""
        timeout_s = self.config.service.call_timeout_s
        runners = [self.host, self.gpu] if self.gpu else [self.host]
        return [runner.call("status", timeout_s=timeout_s) for runner in runners]

    def close(self) -> None:
        """Write what only memory holds below, and stop. Idempotent."""
        try:
            if self.gpu is not None:
                self.gpu.stop()
        finally:
            self.host.stop()


def local(config: Config, gpu: bool = True) -> Client:
    """A client whose service lives and ends with it in this process."""
    return Client(Local(config, gpu))
