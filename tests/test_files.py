"""Every module says what it is for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(str(path.relative_to(ROOT)) for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("name", ["src", "tests"])
def test_every_module_says_what_it_is_for(name: str) -> None:
    mine = [file for file in FILES if file.startswith(name)]
    assert len(mine) > 10
    assert [file for file in mine if not ast.get_docstring(ast.parse((ROOT / file).read_text(encoding="utf-8")))] == []
