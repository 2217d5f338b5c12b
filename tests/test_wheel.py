"""A wheel in an empty environment serves, drafts and shows its page. Without that environment: what goes into it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.long
@pytest.mark.real
def test_a_wheel_serves(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "scripts/try_wheel.py"), str(tmp_path)], check=True)


def test_the_wheel_takes_every_file_that_is_not_code() -> None:
    package = ROOT / "src/forerun"
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["forerun"]
    files = [str(file.relative_to(package)) for file in package.rglob("*") if file.is_file()]
    others = [name for name in files if not name.endswith(".py") and "__pycache__" not in name]
    assert any(name.startswith("serve/page/") for name in others) and any(name.startswith("data/") for name in others)
    assert [name for name in others if not any(fnmatch(name, p.replace("**/*", "*")) for p in patterns)] == []


def test_every_package_is_found() -> None:
    """A folder with code needs an `__init__.py`, or it stays behind."""
    folders = {file.parent for file in (ROOT / "src/forerun").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []
