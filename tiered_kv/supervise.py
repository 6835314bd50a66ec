"""The one broad `except` of the package: an unknown failure is logged and told, and ends there."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


@contextmanager
def surviving(doing: str) -> Iterator[list[str]]:
    """Go on after the block, whatever it raises; the list then has one line that says what.

    A cancelled task and the end of the process pass through.
    """
    failure: list[str] = []
    try:
        yield failure
    except Exception as error:
        log.exception("%s failed", doing)
        failure.append(f"{doing}: {error!r}")
