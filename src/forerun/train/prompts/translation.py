"""Requests to translate, as people write them: single sentences, messages, lists, words, and from other languages."""

from __future__ import annotations

import random
import re

from forerun.train.prompts.material import WORDS, draw_word, fill_blanks, read_material

TEXTS = read_material("translation")
BLANKS = WORDS | TEXTS["blanks"]
TONGUES: dict[str, float] = TEXTS["tongues"]


def translation_prompt(chance: random.Random) -> str:
    """Some request for a translation."""
    kind = chance.choices(("one", "many", "steps", "back", "words"), weights=(40, 22, 6, 24, 8))[0]
    tongue, other = chance.choices(list(TONGUES), weights=list(TONGUES.values()), k=2)
    if kind == "one":
        template, text = chance.choice(TEXTS["one"]), _sentence(chance)
    elif kind == "many":
        template, text = chance.choice(TEXTS["many"]), _message(chance)
    elif kind == "steps":
        template = chance.choice(TEXTS["many"][:5])
        text = "\n".join(f"{number}. {_sentence(chance)}" for number in range(1, chance.randint(3, 6)))
    elif kind == "back":
        tongue = chance.choices(list(TEXTS["foreign"]), weights=(30, 30, 22, 10, 8))[0]
        said = chance.sample(TEXTS["foreign"][tongue], chance.choice((1, 1, 2, 3)))
        template, text = chance.choice(TEXTS["back"]), " ".join(_ended(_filled(one, chance)) for one in said)
    else:
        template = chance.choice(TEXTS["vocabulary"])
        text = ", ".join(chance.sample(TEXTS["nouns"], chance.randint(3, 7)))
    return str(template).replace("{tongue}", tongue).replace("{tongue2}", other).replace("{text}", text)


def _sentence(chance: random.Random) -> str:
    filled = _filled(chance.choice(TEXTS["english"]), chance)
    return _ended(filled[0].upper() + filled[1:])


def _ended(sentence: str) -> str:
    if sentence[-1] in ".?!":
        return sentence
    asks = re.match(r"(how|could|would you|is there|can|do you|what|where)\b", sentence.lower())
    return sentence + ("!" if sentence.startswith("What a") else "?" if asks else ".")


def _message(chance: random.Random) -> str:
    """A few sentences, often with a greeting and an end."""
    text = " ".join(_sentence(chance) for _ in range(chance.randint(2, 4)))
    if chance.random() < 0.6:
        text = _filled(chance.choice(TEXTS["openings"]), chance) + chance.choice((" ", "\n\n", "\n")) + text
    if chance.random() < 0.5:
        text += chance.choice((" ", "\n\n", "\n")) + _filled(chance.choice(TEXTS["closings"]), chance)
    return text


def _filled(template: str, chance: random.Random) -> str:
    def word_for(blank: str) -> str:
        if blank.startswith("hour"):
            return f"{chance.randint(7, 21)}:{chance.choice(('00', '15', '30', '45'))}"
        if blank == "number":
            return str(chance.randint(3, 40))
        if blank == "price":
            return str(10 * chance.randint(2, 40))
        return draw_word(blank, chance, BLANKS)

    return fill_blanks(template, word_for)
