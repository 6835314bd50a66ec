"""docs/structure.md has a line for each module, under the folder it lies in."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def modules() -> set[str]:
    found = set()
    for top in ("tiered_kv", "actors", "policies"):
        for file in (ROOT / top).rglob("*.py"):
            inside = file.relative_to(ROOT)
            linked = inside.parts[:2] in {("tiered_kv", "actors"), ("tiered_kv", "policies")}
            if file.read_text().strip() and not linked:
                found.add(str(inside))
    return found


def listed() -> set[str]:
    found, folder = set(), ""
    for line in (ROOT / "docs" / "structure.md").read_text().splitlines():
        if heading := re.match(r"## `([a-z_/]+)/`", line):
            folder = heading[1]
        elif row := re.match(r"\| `(\w+\.py)` \| \S", line):
            found.add(f"{folder}/{row[1]}")
    return found


def test_each_module_has_its_line_and_each_line_its_module() -> None:
    assert listed() == modules()
