"""Passages wrapped as tasks: summaries, questions, extraction, translation, editing.

The passages are notices, mails and reports with random facts filled in, Python's own documentation (PSF licence), and
texts that the model has written itself.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from forerun.train.prompts.material import FIRST_NAMES, WORDS, fill_blanks, read_material
from forerun.train.prompts.templates import fill

TEXTS: dict[str, list[str]] = read_material("passages")
TASKS = {"summary": 0.26, "extract": 0.22, "question": 0.28, "edit": 0.24}


def notice(chance: random.Random) -> str:
    """A passage with facts that nobody has read before."""
    return _fill_facts(chance.choice(TEXTS["notices"]), chance)


def _fill_facts(text: str, chance: random.Random) -> str:
    they, them = chance.choice([("he", "him"), ("she", "her")])

    def date() -> str:
        return f"{chance.randint(1, 28)} {chance.choice(WORDS['month'])}"

    def first_name() -> str:
        return chance.choice(FIRST_NAMES)

    facts = {
        "name": first_name(),
        "name2": first_name(),
        "name3": first_name(),
        "surname": chance.choice(WORDS["surname"]),
        "company": chance.choice(WORDS["company"]),
        "place": chance.choice(WORDS["place"]),
        "place2": chance.choice(WORDS["place"]),
        "topic": chance.choice(WORDS["topic"]),
        "object": chance.choice(WORDS["object"]),
        "object2": chance.choice(WORDS["object"]),
        "food": chance.choice(WORDS["food"]),
        "food2": chance.choice(WORDS["food"]),
        "language": chance.choice(WORDS["language"]),
        "date": date(),
        "date2": date(),
        "olddate": f"{date()} {chance.randint(1940, 2005)}",
        "month": chance.choice(WORDS["month"]),
        "year": str(chance.randint(1985, 2012)),
        "year2": str(chance.randint(2013, 2027)),
        "oldyear": str(chance.randint(1100, 1600)),
        "oldyear2": str(chance.randint(1601, 1900)),
        "small": str(chance.randint(2, 9)),
        "small2": str(chance.randint(3, 12)),
        "number": str(chance.randint(12, 90)),
        "number2": str(chance.randint(10, 60)),
        "price": f"{chance.randint(15, 400)}.{chance.choice(['00', '50', '95', '99'])}",
        "code": f"{chance.choice('ABCDEFGHKLM')}{chance.choice('NPRSTUVX')}{chance.randint(100, 9999)}",
        "phone": f"555-{chance.randint(1000, 9999)}",
        "hour": f"{chance.randint(7, 11)}:{chance.choice(['00', '15', '30', '45'])}",
        "hour2": f"{chance.randint(13, 17)}:{chance.choice(['00', '30'])}",
        "letter": chance.choice("ABCDEF"),
        "pressure": f"{chance.randint(105, 160)}/{chance.randint(65, 100)}",
        "they": they,
        "them": them,
    }
    facts["domain"] = re.sub(r"[^a-z]", "", facts["company"].lower())
    facts["email"] = f"{facts['surname'].lower()}@{facts['domain']}.com"
    return fill_blanks(text, lambda blank: facts[blank])


def passage_prompt(passage: str, chance: random.Random) -> str:
    """The passage as a task."""
    kind = chance.choices(list(TASKS), weights=list(TASKS.values()))[0]
    template = chance.choice(TEXTS[kind]).replace("{question}", chance.choice(TEXTS["questions"]))
    before, after = template.split("{passage}")
    wrapped = [fill(part, chance) if "{" in part else part for part in (before, after)]  # not the passage's braces
    return wrapped[0] + passage + wrapped[1]


def code_prompt(source: str, chance: random.Random) -> str:
    """A piece of code as a task."""
    return chance.choice(TEXTS["code"]).replace("{passage}", source)


def long_text(paragraphs: Sequence[str], chance: random.Random) -> str:
    """Paragraphs in a row, 1200 to 6000 characters if there are as many."""
    wanted = chance.choice((1200, 1800, 2400, 3200, 4500, 6000))
    start = chance.randrange(max(1, len(paragraphs) // 2))
    held: list[str] = []
    for paragraph in paragraphs[start:]:
        if held and sum(map(len, held)) + len(paragraph) > wanted:
            break
        held.append(paragraph)
    return "\n\n".join(held)


def excerpt(paragraphs: Sequence[str], chance: random.Random, most: int = 1400) -> str:
    """A few paragraphs in a row, at most so many characters."""
    start = chance.randrange(len(paragraphs))
    wanted = chance.choice((300, 500, 700, 1000, most))
    text = paragraphs[start]
    for paragraph in paragraphs[start + 1 :]:
        if len(text) + len(paragraph) > wanted:
            break
        text += "\n\n" + paragraph
    return text[:most]
