"""The built-in mixture of prompts, the same for the same seed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from forerun.train.prompts import documents
from forerun.train.prompts.passages import code_prompt, excerpt, long_text, notice, passage_prompt, reading_prompt
from forerun.train.prompts.phrases import Phrases, casual, read_rules
from forerun.train.prompts.prompt import TrainingPrompt

TEXTS = read_rules("mixture")
ARTICLES = 64  # of the latest answers, to put together
LONGEST = 6000  # characters, about 1400 tokens
SHARES: dict[str, float] = TEXTS["shares"]
RULES = {kind: read_rules(kind) for kind in ("templates", "talk", "translation", "puzzles", "facts")}


def _phrase(kind: str, chance: random.Random) -> str:
    """A prompt of one of the kinds that are rules alone."""
    text = Phrases(RULES[kind], chance).fill("{prompt}")
    return text if kind == "translation" else casual(text, chance)  # what is to be translated stays as it is


WRITERS: dict[str, Callable[[random.Random], str]] = {kind: partial(_phrase, kind) for kind in RULES}
WRITERS["reading"] = reading_prompt


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts to make tasks of."""

    manual: list[list[str]]  # per topic its paragraphs
    docstrings: list[str]
    functions: list[str]
    added: list[list[str]]  # the user's


def read_corpus(texts: Path | None = None) -> Corpus:
    """What comes with Python, and the texts of a folder of the user's."""
    docstrings, functions = documents.docstrings_and_functions(TEXTS["modules"])
    added = documents.folder_paragraphs(texts) if texts else []
    return Corpus(documents.manual_paragraphs(), docstrings, functions, added)


def built_in_prompts(seed: int, corpus: Corpus) -> Iterator[TrainingPrompt]:
    """Endless prompts of all kinds."""
    chance = random.Random(f"forerun {seed}")
    manual, docstrings, functions, added = corpus.manual, corpus.docstrings, corpus.functions, corpus.added
    while True:
        kind = chance.choices(list(SHARES), weights=list(SHARES.values()))[0]
        if kind == "code" and not functions:
            kind = "templates"
        if kind in WRITERS:
            text = WRITERS[kind](chance)
        elif kind == "notices" or (kind == "documentation" and not (manual or docstrings or added)):
            text = passage_prompt(notice(chance), chance)
        elif kind == "long":
            text = passage_prompt(_long_document(corpus, chance), chance)
        elif kind == "code":
            text = code_prompt(chance.choice(functions), chance)
        elif added and (chance.random() < 0.6 or not (manual or docstrings)):
            text = passage_prompt(excerpt(chance.choice(added), chance), chance)
        elif docstrings and (not manual or chance.random() < 0.4):
            text = passage_prompt(chance.choice(docstrings), chance)
        else:
            text = passage_prompt(excerpt(chance.choice(manual), chance), chance)
        yield _with_system(text, chance)


def _long_document(corpus: Corpus, chance: random.Random) -> str:
    """Some hundred tokens to over a thousand: pages of a manual, or notices one behind the other."""
    pages = [*corpus.manual, *corpus.added]
    if pages and chance.random() < 0.6:
        return long_text(chance.choice(pages), chance)
    return long_text([notice(chance) for _ in range(8)], chance)


def _with_system(text: str, chance: random.Random) -> TrainingPrompt:
    if chance.random() > 0.06:
        return text
    system = Phrases(TEXTS, chance).fill("{systems}")
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def next_turns(talks: Iterable[tuple[TrainingPrompt, str]], seed: int) -> Iterator[TrainingPrompt]:
    """From prompts and their answers: the conversation goes on, or answers are the passage of a new task.

    Some answers together make a long input, the way search results do.
    """
    chance = random.Random(f"forerun next {seed}")
    articles: deque[str] = deque(maxlen=ARTICLES)
    for prompt, answer in talks:
        if len(answer) >= 500:
            articles.append(answer)
        if len(answer) >= 500 and len(articles) >= 4 and chance.random() < 0.3:
            together = [answer, *chance.sample(list(articles), chance.choice((1, 2, 2, 3)))]
            numbered = [f"[{number}] {text}" for number, text in enumerate(together, 1)]
            yield passage_prompt("\n\n".join(numbered)[:LONGEST], chance)
            continue
        if len(answer) >= 200 and chance.random() < 0.62:
            paragraphs = [part for part in answer.split("\n\n") if part.strip()]
            passage = excerpt(paragraphs, chance) if len(answer) > 900 else answer
            if len(passage) >= 120:
                yield (
                    casual(passage_prompt(passage, chance), chance)
                    if len(passage) < 300
                    else passage_prompt(passage, chance)
                )
                continue
        said = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        follow = casual(Phrases(TEXTS, chance).fill("{follow_ups}"), chance)
        yield [*said, {"role": "assistant", "content": answer}, {"role": "user", "content": follow}]
