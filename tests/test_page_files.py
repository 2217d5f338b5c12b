"""The page's files, read only: small, each says what it is for, and nothing in them turns text into HTML or code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "src/forerun/serve/page"
FILES = {path.name: path.read_text(encoding="utf-8") for path in sorted(PAGE.iterdir())}
WRITTEN = [name for name in FILES if name.endswith((".js", ".css"))]
UNSAFE = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setAttribute\(\"style|srcdoc"


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_is_short_and_says_what_it_is_for(name: str) -> None:
    lines = FILES[name].splitlines()
    assert lines[0].startswith(("/*", "//"))
    assert len(lines) <= 400
    assert max(len(line) for line in lines) <= 120


@pytest.mark.parametrize("name", WRITTEN)
def test_nothing_makes_html_or_code_of_text(name: str) -> None:
    assert re.findall(UNSAFE, FILES[name]) == []


def test_no_address_of_another_host() -> None:
    found = {address for text in FILES.values() for address in re.findall(r"https?://[\w.]+", text)}
    assert found == {"http://www.w3.org"}  # the name of SVG, which nobody fetches


def test_every_file_is_used_and_every_name_exists() -> None:
    used = {"index.html"}
    for text in FILES.values():
        used |= set(re.findall(r'"(?:\./|/page/)([\w.]+)"', text))
    assert used == set(FILES)


def test_the_document_has_no_script_or_style_of_its_own() -> None:
    assert re.findall(r"<style|style=|<script>|\son\w+=", FILES["index.html"]) == []
