"""What is typed in another form than the options of a generation have: by flags, and behind `/set` in a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, get_args, get_type_hints

from forerun.cli.flags import Typed, require_positive, with_flags
from forerun.errors import ForerunError
from forerun.media.sources import media_part
from forerun.options import GenerationOptions


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


TYPED: Typed = {
    "logit_bias": (list[str] | None, lambda texts: parse_logit_bias(texts or ()) or None),
    "suppress": (list[str] | None, lambda texts: parse_suppress(texts or ()) or None),
    **dict.fromkeys(("stop", "images", "videos", "audio"), (list[str] | None, lambda texts: texts or None)),
    "draft_tokens": (str, parse_draft_tokens),
}
with_generation_flags = with_flags("options", GenerationOptions, TYPED)
# As on the command line: temp → temperature, n → max_tokens.
SHORT_NAMES = {
    flag.lstrip("-"): entry.name for entry in fields(GenerationOptions) for flag in entry.metadata.get("flags", ())
}


def check_options(options: GenerationOptions) -> None:
    """The library checks these too, but a typing mistake or a missing file should not cost a model load."""
    require_positive("--max-tokens", options.max_tokens)
    options.sampling()
    if options.lang_bias is not None:
        from forerun.sample.language import parse_language_bias

        parse_language_bias(options.lang_bias)
    for kind, files in options.media.items():
        for file in files:
            media_part(kind, file)


def parse_option(name: str, text: str) -> Any:
    """An option's value as it is typed behind its name: `/set temperature=0.8`."""
    hints = get_type_hints(GenerationOptions)
    if name not in hints:
        near = get_close_matches(name, hints, n=1)
        raise ForerunError(f"there is no option {name!r}: " + (f"did you mean {near[0]}?" if near else "see /help"))
    if text in ("", "none", "default"):
        return next(entry.default for entry in fields(GenerationOptions) if entry.name == name)
    if name in TYPED:
        typed, read = TYPED[name]
        return read(text if typed is str else [text])
    if hints[name] is bool:
        if text not in ("true", "false"):
            raise ForerunError(f"{name} must be true or false, not {text!r}")
        return text == "true"
    kinds = [kind for kind in get_args(hints[name]) or (hints[name],) if kind is not type(None)]
    if not isinstance(kinds[0], type):  # the words of a Literal
        if text not in kinds:
            raise ForerunError(f"{name} must be one of {', '.join(map(str, kinds))}, not {text!r}")
        return text
    try:
        return kinds[0](text)
    except ValueError:
        wanted = "a whole number" if kinds[0] is int else "a number"
        raise ForerunError(f"{name} must be {wanted}, not {text!r}") from None
