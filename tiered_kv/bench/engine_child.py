"""An engine in a process of its own, for `bench engine`: it serves prompts and tells how long it
took.

Run by an interpreter that has vLLM, with the settings of `engine_contenders.ENVIRONMENT`.
"""

import importlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tiered_kv.bench.engine_pipe import serve

if TYPE_CHECKING:
    from vllm import LLM

SERVER_S = 120.0
RESET_S = 60.0
STIRS, STIR_TOKENS = 3, 8


class Engine:
    """The verbs of the process. One engine, and where a peer needs one, its server."""

    def __init__(self) -> None:
        self._llm: LLM | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._stirred = 0

    def start(
        self, model: str, connector: dict[str, Any] | None, page_tokens: int, max_tokens: int,
        server: Sequence[str] = (), port: int = 0, prepare: str = "",
    ) -> dict[str, Any]:  # fmt: skip
        """Load the model; a minute on busy cores. `server` is a command that listens on `port`,
        `prepare` a module whose `prepare` is called before anything of vLLM is."""
        if prepare:
            importlib.import_module(prepare).prepare()
        if server:
            self._start_server(server, port)
        from vllm import LLM
        from vllm.config import KVTransferConfig

        began = time.perf_counter()
        self._llm = llm = LLM(
            model=model, dtype="bfloat16", block_size=page_tokens, max_model_len=max_tokens,
            max_num_seqs=16, enforce_eager=True, enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256_cbor", disable_log_stats=True, seed=0,
            kv_transfer_config=KVTransferConfig(**connector) if connector else None,
        )  # fmt: skip
        vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
        return {"seconds": time.perf_counter() - began, "vocabulary": vocabulary}

    def serve(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Serve the prompts together, greedily: seconds until all are done, tokens of each prompt
        that came from a cache, and what was answered."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        began = time.perf_counter()
        done = self._engine.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "cached": [one.num_cached_tokens or 0 for one in done],
            "answers": [list(one.outputs[0].token_ids) for one in done],
        }

    def settle(self, seconds: float) -> None:
        """Let the engine turn, so that what it saves beside its work gets done: connectors move
        on in the engine's steps only."""
        end = time.monotonic() + seconds
        for _ in range(STIRS):
            self._stirred += 1
            rng = random.Random(f"stir {self._stirred}")
            self.serve([[rng.randrange(3, 200) for _ in range(STIR_TOKENS)]], 2)
        while time.monotonic() < end:
            self._engine.llm_engine.step()
            time.sleep(0.01)

    def reset(self, connector: bool = False) -> None:
        """Empty the engine's own prefix cache, and with `connector` the memory of its connector.

        Waits for saves that still read the engine's pages."""
        end = time.monotonic() + RESET_S
        while not self._engine.reset_prefix_cache(reset_connector=connector):
            if time.monotonic() > end:
                raise RuntimeError(f"the prefix cache is in use after {RESET_S:g} s")
            self.settle(0.1)

    def model(self) -> str:
        """The folder of the model that this benchmark takes by default; made once."""
        from tiered_kv.demo.model import converted

        return str(converted())

    def close(self) -> None:
        """Shut down the engine and its server."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
        if self._server is not None:
            self._server.send_signal(signal.SIGINT)
            try:
                self._server.wait(10)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()

    @property
    def _engine(self) -> "LLM":
        if self._llm is None:
            raise RuntimeError("the engine was not started")
        return self._llm

    def _start_server(self, command: Sequence[str], port: int) -> None:
        # stdout is this process's stderr by now, and the server's too.
        self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, stderr=2)
        end = time.monotonic() + SERVER_S
        while time.monotonic() < end:
            if self._server.poll() is not None:
                raise RuntimeError(f"{command[0]} ended with {self._server.returncode}")
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"{command[0]} does not listen on port {port} after {SERVER_S:g} s")


def main() -> None:
    """Until the parent says stop, or is gone."""
    engine = Engine()
    try:
        serve({
            "start": engine.start, "serve": engine.serve, "settle": engine.settle,
            "reset": engine.reset, "model": engine.model,
        })  # fmt: skip
    finally:
        engine.close()


if __name__ == "__main__":
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    main()
