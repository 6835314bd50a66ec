"""Running the command line: in this process, or as a process of its own."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tiered_kv import errors
from tiered_kv.cli import main
from tiered_kv.config import Config

PACKAGE = Path(errors.__file__).parents[1]
PROGRAM = [sys.executable, "-m", "tiered_kv"]
PATIENCE_S = 90.0


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    def failed(self, code: int = 1) -> str:
        """The one line of a failure, which must be the only one."""
        assert self.code == code, self
        assert self.err.startswith("tiered-kv: "), self
        assert self.err.count("\n") == 1, self
        return self.err

    def document(self) -> Any:
        """The one JSON document on stdout."""
        assert self.code == 0, self
        return json.loads(self.out)


def call(*args: str) -> Ended:
    """The command line in this process: fast, and blind for what native code prints."""
    out, err, hook = io.StringIO(), io.StringIO(), sys.excepthook
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main(args)
    finally:
        sys.excepthook = hook
    code = ended.value.code
    assert isinstance(code, int)
    return Ended(code, out.getvalue(), err.getvalue())


def process(*args: str, env: Mapping[str, str] | None = None) -> Ended:
    """A process of its own, to its end."""
    done = subprocess.run(
        [*PROGRAM, *args], capture_output=True, text=True, env=_environment(env), check=False,
        timeout=PATIENCE_S,
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr)


@contextmanager
def running(*args: str, env: Mapping[str, str] | None = None) -> Iterator["subprocess.Popen[str]"]:
    """A process of its own, killed at the end if it still runs then."""
    with subprocess.Popen(
        [*PROGRAM, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=_environment(env),
    ) as child:  # fmt: skip
        try:
            yield child
        finally:
            child.kill()


def wait_for_line(child: "subprocess.Popen[str]", part: str) -> None:
    """Read the child's stdout up to a line that has `part`."""
    assert child.stdout is not None
    for line in child.stdout:
        if part in line:
            return
    assert child.stderr is not None
    pytest.fail(f"the program ended without {part!r}: {child.stderr.read()}")


def interrupt(child: "subprocess.Popen[str]") -> Ended:
    """Ctrl-C, and how it ended."""
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=PATIENCE_S)
    return Ended(child.returncode, out, err)


def files_of(pid: int, folder: str) -> list[str]:
    """Files with a name below `folder` that a process has open or mapped."""
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(os.readlink(fd))
        except FileNotFoundError:
            continue  # closed meanwhile
    maps = Path(f"/proc/{pid}/maps").read_text()
    found |= {line.split(maxsplit=5)[-1] for line in maps.splitlines()}
    return sorted(name for name in found if name.startswith(folder) and Path(name).exists())


def gone(paths: list[str]) -> bool:
    """Whether none of the files is there any more, now or in a moment."""
    end = time.monotonic() + 10
    while any(Path(path).exists() for path in paths) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(Path(path).exists() for path in paths)


def write_toml(config: Config, file: Path) -> str:
    """A configuration as the file that `--config` reads."""
    document = config.as_dict()
    document["service"]["tenant_secret"] = config.service.tenant_secret
    lines = []
    for section, values in document.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_toml(value)}" for key, value in values.items()]
    file.write_text("\n".join(lines))
    return str(file)


def _toml(value: object) -> str:
    """JSON's numbers, strings and lists are TOML's."""
    return json.dumps(int(value) if isinstance(value, int) else value)


def _environment(more: Mapping[str, str] | None) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(PACKAGE), **(more or {})}
