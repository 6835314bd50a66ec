import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKED = ("actors", "policies")
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def folder_of(package: str) -> Path:
    """Where setuptools looks for a package: the longest mapped prefix decides."""
    parts = package.split(".")
    for end in range(len(parts), 0, -1):
        mapped = SETUPTOOLS["package-dir"].get(".".join(parts[:end]))
        if mapped is not None:
            return ROOT.joinpath(mapped, *parts[end:])
    return ROOT.joinpath(*parts)


def packages_in_the_tree() -> set[str]:
    found = set()
    for top, name in [("tiered_kv", "tiered_kv"), *((top, f"tiered_kv.{top}") for top in LINKED)]:
        for file in (ROOT / top).rglob("*.py"):  # does not follow links
            below = file.parent.relative_to(ROOT / top).parts
            if below[:1] not in [(link,) for link in LINKED]:
                found.add(".".join((name, *below)))
    return found


def test_pyproject_lists_exactly_the_packages_of_the_tree() -> None:
    assert sorted(SETUPTOOLS["packages"]) == sorted(packages_in_the_tree())


def test_every_listed_package_has_an_init_file() -> None:
    assert [p for p in SETUPTOOLS["packages"] if not (folder_of(p) / "__init__.py").is_file()] == []


@pytest.mark.parametrize("name", LINKED)
def test_a_relative_link_shows_the_folder_inside_the_package(name: str) -> None:
    link = ROOT / "tiered_kv" / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"
    assert folder_of(f"tiered_kv.{name}").samefile(link)


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "tiered_kv" / "py.typed").is_file()


def imported_names(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_nothing_imports_the_linked_folders_by_their_bare_names() -> None:
    files = [
        file
        for top in ("tiered_kv", "tests", "examples", *LINKED)
        for file in (ROOT / top).rglob("*.py")
    ]
    assert len(files) > 20
    assert [str(f.relative_to(ROOT)) for f in files if imported_names(f) & set(LINKED)] == []


def test_a_module_is_one_module_from_outside_the_repository(tmp_path: Path) -> None:
    code = "import tiered_kv.policies as p; print(p.__name__, p.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    name, file = done.stdout.split()
    assert name == "tiered_kv.policies"
    assert Path(file).samefile(ROOT / "policies" / "__init__.py")
