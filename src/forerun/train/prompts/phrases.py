"""Texts drawn from rules, which are data: the TOML files under `data/prompts`.

A rule is a list of texts, one of which is drawn; a table of texts and how often each is drawn; or a whole number, as in
"2..9" (any from 2 to 9) or "2*small+1..6" (small is another rule). Texts have blanks, filled by the rules they name:

    {topic}    the same text wherever the blank stands in a prompt
    {topic2}   another one of the same rule; the blanks of a text drawn for it get the same number at their end
    {Topic}    with a capital letter
    {they.1}   its second part; parts are divided by "|"
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from math import prod
from typing import Any

BLANK = re.compile(r"\{(\w+)(?:\.(\w+))?\}")


def read_rules(name: str) -> dict[str, Any]:
    """One file of rules."""
    return tomllib.loads(files("forerun").joinpath(f"data/prompts/{name}.toml").read_text(encoding="utf-8"))


WORDS = read_rules("words")
WORDS["first_name"] = [name for name in WORDS["name"] if " " not in name]
CASUAL: dict[str, list[str]] = read_rules("casual")


class Phrases:
    """Fills the blanks of one prompt, by these rules and the common words; `drawn` are blanks whose text is known."""

    def __init__(self, rules: Mapping[str, Any], chance: random.Random, **drawn: str) -> None:
        self._rules, self._chance, self._drawn = WORDS | dict(rules), chance, drawn
        self._taken: dict[str, list[str]] = {}

    def fill(self, template: str, number: str = "") -> str:
        """The template with a text for every blank; `number` is put behind the name of each."""
        return BLANK.sub(lambda blank: self._form(self._text(blank[1] + number), blank[2]), template)

    def _text(self, name: str) -> str:
        if name[0].isupper():
            return capitalised(self._text(name[0].lower() + name[1:]))
        if name not in self._drawn:
            self._drawn[name] = self._draw(name)
        return self._drawn[name]

    def _draw(self, name: str) -> str:
        base = name if name in self._rules else name.rstrip("0123456789")
        rule = self._rules[base]
        if isinstance(rule, str):
            return str(sum(prod(map(self._factor, term.split("*"))) for term in rule.split("+")))
        taken = self._taken.setdefault(base, [])
        left = [text for text in rule if text not in taken]
        weights = [rule[text] for text in left] if isinstance(rule, dict) else None
        text: str = self._chance.choices(left, weights)[0]
        if "{" not in text:  # a text with blanks may come twice, with other words in it
            taken.append(text)
        return self.fill(text, name[len(base) :])

    def _factor(self, text: str) -> int:
        """A number, the name of one, or `least..most`."""
        least, _, most = text.partition("..")
        if most:
            return self._chance.randint(self._factor(least), self._factor(most))
        return int(text) if text.isdigit() else int(self._text(text))

    def _form(self, text: str, form: str | None) -> str:
        if form is None:
            return text
        if form == "letters":  # as in the name of a web site
            return re.sub(r"[^a-z]", "", text.lower())
        return _misspelt(text, self._chance) if form == "broken" else text.split("|")[int(form)]


def capitalised(text: str) -> str:
    """With a capital letter at the beginning, and all others as they are."""
    return text[0].upper() + text[1:]


def casual(prompt: str, chance: random.Random) -> str:
    """People do not always write neatly."""
    dice = chance.random()
    if dice < 0.08:
        return prompt.lower().rstrip(".?!")
    if dice < 0.12:
        return prompt.lower()
    if dice < 0.16:
        return prompt.rstrip(".") + chance.choice(CASUAL["wishes"])
    if dice < 0.19:
        return chance.choice(CASUAL["greetings"]) + prompt
    if dice < 0.22:
        return prompt.rstrip(".") + chance.choice(CASUAL["limits"])
    return prompt


def _misspelt(sentence: str, chance: random.Random) -> str:
    for pair in chance.sample(CASUAL["mistakes"], 3):
        right, wrong = pair.split("|")
        sentence = sentence.replace(right, wrong)
    letters = list(sentence)
    if len(letters) > 12:
        place = chance.randrange(4, len(letters) - 4)
        letters[place], letters[place + 1] = letters[place + 1], letters[place]
    return "".join(letters)
