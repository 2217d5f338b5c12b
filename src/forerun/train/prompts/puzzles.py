"""Word problems as people pose them, about money, time, ages, sharing, mixing, measuring and logic."""

from __future__ import annotations

import random
from collections.abc import Callable

from forerun.train.prompts.material import FIRST_NAMES, WORDS, fill_blanks, read_material
from forerun.train.prompts.templates import casual

TEXTS: dict[str, list[str]] = read_material("puzzles")


def puzzle_prompt(chance: random.Random) -> str:
    """One problem with numbers of its own."""
    names = chance.sample(FIRST_NAMES, 3)
    number = chance.randint(12, 96)
    spans: dict[str, Callable[[], object]] = {
        "small": lambda: chance.randint(2, 9),
        "small2": lambda: chance.randint(3, 15),
        "number": lambda: number,
        "number2": lambda: chance.randint(10, 90),
        "large": lambda: chance.randint(100, 960),
        "legs": lambda: 2 * number + 2 * chance.randint(1, number - 1),
        "money": lambda: 5 * number + 5 * chance.randint(1, number - 1),
        "percent": lambda: 5 * chance.randint(1, 17),
        "price": lambda: chance.choice((2.5, 4, 6.5, 9, 12, 13.5, 18, 22)),
        "clock": lambda: f"{chance.randint(7, 20)}:{5 * chance.randint(0, 11):02}",
        "minute": lambda: f"{5 * chance.randint(0, 11):02}",
        "minute2": lambda: f"{5 * chance.randint(0, 11):02}",
        "day": lambda: chance.choice(WORDS["day"]),
        "food": lambda: chance.choice(WORDS["food"]),
        "object": lambda: chance.choice(WORDS["object"]),
        "object2": lambda: chance.choice(WORDS["object"]),
    }
    facts = {name: str(draw()) for name, draw in spans.items()}
    facts |= {"name": names[0], "name2": names[1], "name3": names[2]}
    text = fill_blanks(chance.choice(TEXTS["problems"]), lambda blank: facts[blank])
    return casual(text + chance.choice(TEXTS["endings"]), chance)
