"""Messages of people who chat: small talk, advice, opinions, plans; several sentences, with the details of a life."""

from __future__ import annotations

import random

from forerun.train.prompts.material import WORDS, draw_word, fill_blanks, read_material
from forerun.train.prompts.templates import casual

TEXTS = read_material("talk")
BLANKS = WORDS | TEXTS["blanks"]


def talk_prompt(chance: random.Random) -> str:
    """One message of someone who wants to talk."""
    kind = chance.choices(("trouble", "goal", "opinion", "small", "creative"), weights=(30, 28, 14, 10, 18))[0]
    if kind == "trouble":
        told = [f"{chance.choice(BLANKS['who'])} {chance.choice(TEXTS['did'])}", chance.choice(TEXTS["feel"])]
        if chance.random() < 0.4:
            told.insert(chance.randint(0, 1), chance.choice(TEXTS["about_me"]))
        text = f"{_joined(told, chance)} {chance.choice(TEXTS['ask'])}"
    elif kind == "goal":
        about = chance.sample(TEXTS["about_me"], chance.choice((0, 1, 1, 2, 2)))
        question = chance.choice(TEXTS["goals"])
        text = question if not about else f"{_joined(about, chance)} {question}"
        if about and chance.random() < 0.25:
            text = f"{question} {_joined(about, chance)}"
    elif kind == "opinion":
        text = chance.choice(TEXTS["opinions"])
    else:
        text = chance.choice(TEXTS["small_talk" if kind == "small" else "creative"])
    filled = _filled(text, chance)
    if kind in ("trouble", "goal") and filled[0].islower() and chance.random() < 0.75:
        filled = filled[0].upper() + filled[1:]
    return casual(filled, chance)


def _joined(parts: list[str], chance: random.Random) -> str:
    """Two or three remarks as one or more sentences."""
    if len(parts) == 2 and chance.random() < 0.4:
        return f"{parts[0]} {chance.choice(('and', 'but', 'and now'))} {parts[1]}."
    return " ".join(f"{part if number == 0 else part[0].upper() + part[1:]}." for number, part in enumerate(parts))


def _filled(template: str, chance: random.Random) -> str:
    """Twice, since a blank may bring another one."""
    numbers = {
        "age": lambda: chance.randint(18, 74),
        "small": lambda: chance.randint(2, 9),
        "money": lambda: 20 * chance.randint(1, 40),
    }

    def word_for(blank: str) -> str:
        return str(numbers[blank]()) if blank in numbers else draw_word(blank, chance, BLANKS)

    return fill_blanks(fill_blanks(template, word_for), word_for)
