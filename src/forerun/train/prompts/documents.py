"""Text that every machine with Python has: its reference manual, docstrings and small functions (PSF licence)."""

from __future__ import annotations

import ast
import importlib.util
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from forerun.errors import ForerunError

SHORTEST, LONGEST = 120, 1600


def manual_paragraphs() -> list[list[str]]:
    """The language reference that `help()` shows: per topic its paragraphs."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions pack it apart
        return []
    found = (_paragraphs(text) for text in topics.values())
    return [paragraphs for paragraphs in found if paragraphs]


def docstrings_and_functions(modules: Sequence[str]) -> tuple[list[str], list[str]]:
    """Docstrings long enough to be a passage, and functions short enough to be a question."""
    documents: list[str] = []
    functions: list[str] = []
    for file in _sources(modules):
        try:
            source = file.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) >= SHORTEST:
                    documents.append(text[:LONGEST])
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                code = _dedent(lines[node.lineno - 1 : node.end_lineno])
                if SHORTEST <= len(code) <= 1100 and 4 <= code.count("\n") <= 32:
                    functions.append(code)
    return documents, functions


def folder_paragraphs(folder: Path) -> list[list[str]]:
    """Texts that the user adds: every .txt, .md or .rst file below the folder."""
    files = sorted(file for file in folder.rglob("*") if file.suffix in (".txt", ".md", ".rst") and file.is_file())
    texts = (_paragraphs(file.read_text(encoding="utf-8", errors="replace")) for file in files)
    found = [paragraphs for paragraphs in texts if paragraphs]
    if not found:
        raise ForerunError(f"{folder} holds no texts: give a folder with .txt, .md or .rst files of some paragraphs")
    return found


def _sources(modules: Sequence[str]) -> list[Path]:
    library = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for name in modules:
        folder = library / name
        files += sorted(folder.glob("*.py")) if folder.is_dir() else [library / f"{name}.py"]
    if any(file.is_file() for file in files):
        return files
    found = (importlib.util.find_spec(name) for name in modules)
    return [Path(spec.origin) for spec in found if spec and spec.origin]


def _paragraphs(text: str) -> list[str]:
    parts = re.split(r"\n\s*\n", text)
    neat = (" ".join(part.split()) if not part.startswith((" ", "\t", ">")) else part.rstrip() for part in parts)
    return [part for part in neat if 40 <= len(part) <= LONGEST and not part.lstrip().startswith(("***", "==="))]


def _dedent(lines: list[str]) -> str:
    margin = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[margin:] if line[:margin].isspace() or not line[:margin] else line for line in lines)
