"""Prompts from templates: the kinds of things people type, with topics, names and numbers filled in."""

from __future__ import annotations

import random

from forerun.train.prompts.material import WORDS, draw_word, fill_blanks, read_material

TEXTS: dict[str, list[str]] = read_material("templates")
SHARES = {"chat": 0.26, "questions": 0.20, "writing": 0.16, "code": 0.16, "rewrites": 0.12}  # the rest is arithmetic


def template_prompt(chance: random.Random) -> str:
    """One prompt of any kind."""
    dice = chance.random()
    for kind, share in SHARES.items():
        if dice < share:
            return casual(fill(chance.choice(TEXTS[kind]), chance), chance)
        dice -= share
    return casual(_arithmetic(chance), chance)


def fill(template: str, chance: random.Random) -> str:
    """The template with its blanks filled."""

    def word_for(blank: str) -> str:
        if blank in ("sentence", "sentence2"):
            return fill(chance.choice(TEXTS["sentences"]), chance)
        if blank == "broken":
            return _spoil(fill(chance.choice(TEXTS["sentences"]), chance), chance)
        return draw_word(blank, chance)

    filled = fill_blanks(template, word_for)
    return filled[0].upper() + filled[1:] if template[0] == "{" else filled


def casual(prompt: str, chance: random.Random) -> str:
    """People do not always write neatly."""
    dice = chance.random()
    if dice < 0.08:
        return prompt.lower().rstrip(".?!")
    if dice < 0.12:
        return prompt.lower()
    if dice < 0.16:
        return prompt.rstrip(".") + chance.choice(TEXTS["wishes"])
    if dice < 0.19:
        return chance.choice(TEXTS["greetings"]) + prompt
    if dice < 0.22:
        return prompt.rstrip(".") + chance.choice(TEXTS["limits"])
    return prompt


def _arithmetic(chance: random.Random) -> str:
    """A problem with numbers of its own; all of them are drawn, whichever it needs."""
    small, middle, large = chance.randint(2, 12), chance.randint(10, 99), chance.randint(100, 999)
    facts: dict[str, object] = {
        "name": chance.choice(WORDS["name"]),
        "object": chance.choice(WORDS["object"]),
        "food": chance.choice(WORDS["food"]),
        "price": chance.choice([2.5, 3, 4.25, 5, 7.5, 8, 12, 15, 20]),
        "percent": chance.choice([5, 10, 15, 20, 25, 30, 50]),
        "percent2": chance.choice([10, 15, 20, 25]),
        "friends": chance.randint(2, 6),
        "people": small + chance.randint(1, 6),
        "sum": small * chance.randint(2, 20) + middle,
        "digit": chance.randint(1, 9),
        "hour": chance.randint(6, 11),
        "minute": chance.choice(["00", "15", "30", "45"]),
        "hours": chance.randint(2, 7),
        "minutes": chance.choice([10, 20, 25, 40, 50]),
        "cents": chance.choice(["00", "50", "20"]),
    }
    facts |= {"small": small, "middle": middle, "large": large, "grams": 10 * middle, "price2": 2 * large}
    facts |= {"double": 2 * small, "fourfold": 4 * small, "eightfold": 8 * small, "multiple": 6 * small}
    facts |= {"second": small + middle, "third": small + 2 * middle, "fourth": small + 3 * middle}
    return fill_blanks(chance.choice(TEXTS["arithmetic"]), lambda blank: str(facts[blank]))


def _spoil(sentence: str, chance: random.Random) -> str:
    for pair in chance.sample(TEXTS["mistakes"], 3):
        right, wrong = pair.split("|")
        sentence = sentence.replace(right, wrong)
    letters = list(sentence)
    if len(letters) > 12:
        place = chance.randrange(4, len(letters) - 4)
        letters[place], letters[place + 1] = letters[place + 1], letters[place]
    return "".join(letters)
