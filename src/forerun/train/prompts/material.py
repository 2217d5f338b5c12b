"""Prompt material: word lists, templates and texts in TOML files under `data/prompts`, and how blanks are filled."""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any


def read_material(name: str) -> dict[str, Any]:
    """One file of texts."""
    return tomllib.loads(files("forerun").joinpath(f"data/prompts/{name}.toml").read_text(encoding="utf-8"))


WORDS: dict[str, list[str]] = read_material("words")
FIRST_NAMES = [name for name in WORDS["name"] if " " not in name]


def fill_blanks(template: str, word_for: Callable[[str], str]) -> str:
    """The template with a word for every `{blank}`."""
    return re.sub(r"\{(\w+)\}", lambda found: word_for(found[1]), template)


def draw_word(blank: str, chance: random.Random, lists: Mapping[str, list[str]] = WORDS) -> str:
    """Some word for a blank; a number at its end asks for another word of the same list."""
    return chance.choice(lists[blank.rstrip("0123456789")])
