"""Plain questions about the world, short as people ask them, and articles to write about it.

The articles serve twice: the model's own text about something is what later prompts bring along as a long input.
"""

from __future__ import annotations

import random

from forerun.train.prompts.material import WORDS, fill_blanks, read_material
from forerun.train.prompts.templates import casual

TEXTS = read_material("facts")
FORMS: dict[str, list[str]] = TEXTS["forms"]
THINGS: dict[str, list[str]] = TEXTS["things"] | {"thing": [*TEXTS["things"]["thing"], *WORDS["topic"]]}
MANY = {kind: len(forms) * len(THINGS[kind]) for kind, forms in FORMS.items()}


def fact_prompt(chance: random.Random) -> str:
    """One question about one or two things of a kind."""
    kind = chance.choices(list(MANY), weights=list(MANY.values()))[0]
    things = dict(zip(("it", "it2"), chance.sample(THINGS[kind], 2), strict=True))
    return casual(fill_blanks(chance.choice(FORMS[kind]), lambda blank: things[blank]), chance)
