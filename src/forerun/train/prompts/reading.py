"""Texts put together from sentences with random facts, and what readers ask about them.

Each kind of text has a beginning, sentences of which some are taken in order, and questions that its facts answer.
"""

from __future__ import annotations

import random

from forerun.train.prompts.material import FIRST_NAMES, WORDS, fill_blanks, read_material

TEXTS = read_material("reading")
MONTHS = WORDS["month"][:11]  # without December, as in the mixture that the built-in head was trained on


def reading_prompt(chance: random.Random) -> str:
    """A text nobody has read before, and a task on it."""
    kind = chance.choice(TEXTS["kinds"])
    facts = _facts(chance)
    body = kind["body"]
    count = chance.randint(3, min(8, len(body)))
    taken = sorted(chance.sample(range(len(body)), count))
    sentences = [chance.choice(body[place]) for place in taken]
    text = _filled(" ".join([chance.choice(kind["opening"]) + ".", *sentences]), facts)
    text = text[0].upper() + text[1:]
    asks = dict(zip(("question", "question2", "question3"), chance.sample(kind["questions"], 3), strict=True))
    asks = {name: _filled(question, facts) for name, question in asks.items()}
    return _filled(chance.choice(TEXTS["asked" if chance.random() < 0.6 else "other"]), asks | {"text": text})


def _filled(template: str, facts: dict[str, str]) -> str:
    return fill_blanks(template, lambda blank: facts[blank])


def _facts(chance: random.Random) -> dict[str, str]:
    """What fills the blanks of one text, the same in its questions."""
    names = chance.sample(FIRST_NAMES, 4)
    days = chance.sample(WORDS["day"], 2)
    places = chance.sample(WORDS["place"], 2)
    they, them, their = chance.choice((("he", "him", "his"), ("she", "her", "her")))
    wish = chance.choice(WORDS["wish"])
    facts = {"name": names[0], "name2": names[1], "name3": names[2], "name4": names[3], "day": days[0], "day2": days[1]}
    facts |= {"place": places[0], "place2": places[1], "they": they, "them": them, "their": their}
    facts |= {"They": they.title(), "wish": wish, "Wish": wish[0].upper() + wish[1:]}
    lists = {name: WORDS[name] for name in ("surname", "company", "topic", "object", "food")}
    lists |= {"animal": TEXTS["animal"], "month": MONTHS}
    facts |= {name: chance.choice(entries) for name, entries in lists.items()}
    facts |= {
        "hour": f"{chance.randint(6, 11)}:{chance.choice(('00', '15', '30'))}",
        "hour2": f"{chance.randint(13, 22)}:00",
    }
    facts |= {"date": f"{chance.randint(1, 28)} {chance.choice(MONTHS)}", "phone": f"555-{chance.randint(1000, 9999)}"}
    spans = {"year": (1880, 1930), "year2": (1931, 2015), "oldyear": (1400, 1870), "small": (2, 9), "number": (10, 60)}
    spans |= {"number2": (12, 95), "price": (4, 60), "price2": (20, 200)}
    return facts | {name: str(chance.randint(low, high)) for name, (low, high) in spans.items()}
