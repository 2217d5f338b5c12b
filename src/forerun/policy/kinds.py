"""What kind of request a prompt is: a first guess at how drafts will do, corrected by what is measured."""

from __future__ import annotations

import re
from collections.abc import Sequence

GIVEN = 120  # tokens: longer prompts carry material to work on
REPEATS = 0.25  # share of three-token runs that occurred before: lists, tables, logs
LOOKED_AT = 4000  # characters and tokens, from the end; a prior is not worth reading a book for
RUN = 3

# Spaces are those of one line: blank lines in thousands would else be tried from each of them on.
CODE = re.compile(
    r"^[^\S\n]*(?:def |class |import |from \S+ import |function |(?:const|let|var) \w+ ?=|#include|return\b|SELECT "
    r"|CREATE TABLE|</?\w+>|[}\])]+;?[^\S\n]*$|```|\w+: [\w\"'/.]+$)",
    re.MULTILINE,
)
CODE_LINES = 4  # that look like code before the prompt counts as holding some
WANTS_CODE = re.compile(r"\b(?:function|script|class|SQL|Python|JavaScript|HTML|regex|code)\b")
ASKS = re.compile(r"\?|\b(?:quote|which|what|who|when|where|why|how)\b", re.IGNORECASE)


def kind_of(tokens: Sequence[int], text: str) -> str:
    """One of a handful of kinds, from length, repeated runs, code and questions."""
    text, tokens = text[-LOOKED_AT:], tokens[-LOOKED_AT:]
    if len(CODE.findall(text)) >= CODE_LINES:
        return "given code"
    if repeated(tokens) > REPEATS:
        return "repetitive"
    if len(tokens) >= GIVEN:
        last = text.rstrip().rsplit("\n", 1)[-1]
        first = text.lstrip().split("\n", 1)[0]
        return "question on a text" if ASKS.search(last) or ASKS.search(first) else "given text"
    return "code" if WANTS_CODE.search(text) else "short"


def repeated(tokens: Sequence[int]) -> float:
    """Share of the runs of three tokens that occurred before."""
    runs = [tuple(tokens[n : n + RUN]) for n in range(len(tokens) - RUN + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
