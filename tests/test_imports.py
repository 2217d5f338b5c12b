"""Packages import downwards only, so that there are no cycles between them; and a class has its name to itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src/forerun"

# From the bottom to the top: each imports from those before it. `forerun` is the package's own `__init__.py`.
LAYERS = (
    *("errors", "progress", "tables", "compilation", "cgroups", "memory", "openmp", "home", "kernels", "text", "cache"),
    *("device", "weights", "models", "sample", "options", "draft", "policy", "engine", "proof", "response", "media"),
    *("rollouts", "language_model", "prefix_facts", "loading", "memory_plan", "inspection", "conversion"),
    *("forerun", "train", "serve", "fleet", "bench", "cli"),
)


def imports(node: ast.AST) -> Iterator[str]:
    """Everything of ours that a module imports, inside functions too, but not what only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module == "forerun":
            # The version is everybody's; a module may be imported from the package.
            yield from (
                f"forerun.{alias.name}" if belongs(alias.name) else "forerun"
                for alias in child.names
                if alias.name != "__version__"
            )
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports name the whole path"
            yield str(child.module)
        yield from imports(child)


def belongs(name: str) -> bool:
    """Is it a package or module of ours?"""
    return (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").is_file()


def edges() -> dict[tuple[str, str], set[str]]:
    """(importing, imported) packages, with the files where it happens."""
    found: dict[tuple[str, str], set[str]] = {}
    for file in SOURCE.rglob("*.py"):
        path = file.relative_to(SOURCE)
        here = path.parts[0].removesuffix(".py").replace("__init__", "forerun")
        for name in imports(ast.parse(file.read_text(encoding="utf-8"))):
            if name.split(".")[0] == "forerun":
                there = (*name.split("."), "forerun")[1]
                if there != here:
                    found.setdefault((here, there), set()).add(str(path))
    return found


def test_every_package_has_its_place() -> None:
    names = {
        path.name.removesuffix(".py") for path in SOURCE.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))
    }
    assert names - {"__init__"} <= set(LAYERS), "say in LAYERS what may import the new package"
    assert len(set(LAYERS)) == len(LAYERS)


def test_packages_import_downwards_only() -> None:
    upward = {pair: files for pair, files in edges().items() if LAYERS.index(pair[0]) < LAYERS.index(pair[1])}
    assert upward == {}


def test_upward_imports_are_found_where_they_hide() -> None:
    hidden = """
import torch
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from forerun.cli.main import run
def f():
    try:
        from forerun.bench import plot
    finally:
        import forerun.train.loop
from forerun import __version__, cli, load
"""
    found = [name for name in imports(ast.parse(hidden)) if name.startswith("forerun")]
    assert found == ["forerun.bench", "forerun.train.loop", "forerun.cli", "forerun"]


def test_no_two_modules_have_a_class_of_the_same_name() -> None:
    modules: dict[str, list[str]] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, []).append(str(file.relative_to(SOURCE)))
    assert {name: files for name, files in modules.items() if len(files) > 1} == {}
