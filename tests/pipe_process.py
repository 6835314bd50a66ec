"""A process that `bench engine`'s pipe starts in tests: `python -m pipe_process`."""

import os
import subprocess
import sys
import time

from tiered_kv.bench.engine_pipe import serve


def twice(text: str) -> str:
    print("printed beside")
    return text + text


def fail() -> None:
    raise ValueError("on purpose")


def die() -> None:
    sys.stderr.write("last words\n")
    sys.stderr.flush()
    os._exit(3)


def start_another() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


if __name__ == "__main__":
    serve({
        "twice": twice, "fail": fail, "die": die, "sleep": lambda seconds: time.sleep(seconds),
        "start_another": start_another,
    })  # fmt: skip
