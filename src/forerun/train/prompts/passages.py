"""Texts to work on, and passages wrapped as tasks: summaries, questions, extraction, translation, editing.

The passages are notices, mails and reports with random facts filled in, Python's own documentation (PSF licence), and
texts that the model has written itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from forerun.train.prompts.phrases import Phrases, capitalised, read_rules

PASSAGES, READING = read_rules("passages"), read_rules("reading")
MOST = 1400  # characters of an excerpt


def reading_prompt(chance: random.Random) -> str:
    """A text put together from sentences with random facts, and what readers ask about it or want of it."""
    kind, facts = chance.choice(READING["kinds"]), Phrases(READING, chance)
    body = kind["body"]  # of each list one sentence may be taken
    taken = sorted(chance.sample(range(len(body)), chance.randint(3, min(8, len(body)))))
    sentences = [chance.choice(kind["opening"]) + ".", *(chance.choice(body[place]) for place in taken)]
    text = capitalised(facts.fill(" ".join(sentences)))
    first, second, third = (facts.fill(question) for question in chance.sample(kind["questions"], 3))
    task = Phrases({}, chance, text=text, question=first, question2=second, question3=third)
    return task.fill(chance.choice(READING["asked" if chance.random() < 0.6 else "other"]))


def notice(chance: random.Random) -> str:
    """A passage with facts that nobody has read before."""
    return Phrases(PASSAGES, chance).fill("{notices}")


def passage_prompt(passage: str, chance: random.Random) -> str:
    """The passage as a task."""
    return Phrases(PASSAGES, chance, passage=passage).fill("{task}")


def code_prompt(source: str, chance: random.Random) -> str:
    """A piece of code as a task."""
    return Phrases(PASSAGES, chance, passage=source).fill("{coding}")


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


def excerpt(paragraphs: Sequence[str], chance: random.Random) -> str:
    """A few paragraphs in a row, 300 to 1400 characters if there are as many."""
    start = chance.randrange(len(paragraphs))
    wanted = chance.choice((300, 500, 700, 1000, MOST))
    text = paragraphs[start]
    for paragraph in paragraphs[start + 1 :]:
        if len(text) + len(paragraph) > wanted:
            break
        text += "\n\n" + paragraph
    return text[:MOST]
