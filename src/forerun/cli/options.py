"""What flags mean: the choices, the flags that several commands share, and values that need parsing."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer

from forerun.errors import ForerunError
from forerun.options import SPECULATION


class Precision(StrEnum):
    """What the model computes in."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Quantization(StrEnum):
    """How weights are stored."""

    auto = "auto"
    none = "none"
    int8 = "int8"


# The panels that --help sorts flags into, beside those of the generation options.
MODEL_PANEL = "Model"
OUTPUT_PANEL = "Output"

ModelName = Annotated[
    str,
    typer.Option("--model", "-m", help="Folder, GGUF file, hub id, or built-in name.", rich_help_panel=MODEL_PANEL),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft-model", help="A smaller model with the same tokenizer, or an assistant.", rich_help_panel=SPECULATION
    ),
]
AssistantPosition = Annotated[
    str,
    typer.Option(
        "--assistant-position", help="Where an assistant's queries stand: n-1 or n.", rich_help_panel=SPECULATION
    ),
]
Head = Annotated[
    str | None,
    typer.Option(
        "--head",
        metavar="FOLDER",
        help="An MTP head for the model; default: its own, or one of forerun's.",
        rich_help_panel=SPECULATION,
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, mps …", rich_help_panel=MODEL_PANEL)]
Dtype = Annotated[Precision, typer.Option("--dtype", help="What to compute in.", rich_help_panel=MODEL_PANEL)]
Quantize = Annotated[
    Quantization,
    typer.Option(
        "--quantize", help="How to store the weights; auto: int8 on CPU, none elsewhere.", rich_help_panel=MODEL_PANEL
    ),
]
MaxContext = Annotated[
    int | None,
    typer.Option(
        "--max-context",
        help="Longest prompt plus answer, in tokens; default: the model's.",
        rich_help_panel=MODEL_PANEL,
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, nothing else.", rich_help_panel=OUTPUT_PANEL)
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, no statistics.", rich_help_panel=OUTPUT_PANEL)]


def parse_draft_tokens(text: str) -> int | str:
    """`auto`, or how many tokens to draft per round."""
    if text == "auto":
        return text
    count = _parse_integer(text)
    if count is None or count < 1:
        raise ForerunError(f"--draft-tokens {text}: give auto or a whole number from 1 up (to not draft: --draft off)")
    return count


def parse_logit_bias(texts: Sequence[str]) -> dict[int, float]:
    """`["5=-2,7=1.5", "9=3"]` → `{5: -2.0, 7: 1.5, 9: 3.0}`."""
    biases: dict[int, float] = {}
    for part in _split_commas(texts):
        name, equals, value = part.partition("=")
        token, bias = _parse_integer(name), _parse_number(value)
        if not equals or token is None or token < 0 or bias is None:
            raise ForerunError(f"--logit-bias {part}: write ID=BIAS,ID=BIAS with token ids, for example 11=-5,42=2.5")
        if token in biases:
            raise ForerunError(f"--logit-bias gives token {token} twice: keep one of them")
        biases[token] = bias
    return biases


def parse_suppress(texts: Sequence[str]) -> frozenset[int]:
    """`["1,2", "3"]` → `{1, 2, 3}`."""
    tokens = set()
    for part in _split_commas(texts):
        token = _parse_integer(part)
        if token is None or token < 0:
            raise ForerunError(f"--suppress {part}: give token ids separated by commas, for example 11,42")
        tokens.add(token)
    return frozenset(tokens)


def require_positive(flag: str, value: int | None) -> None:
    """Refuse counts below one."""
    if value is not None and value < 1:
        raise ForerunError(f"{flag} {value}: give a whole number from 1 up")


def _split_commas(texts: Sequence[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",")]


def _parse_integer(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
