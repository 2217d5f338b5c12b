"""Token sets by Unicode script, for `--lang-bias ja=-inf,zh=-5`.

A token belongs to a language when its text holds a letter (or a vowel sign or another mark) of one of the language's
scripts. Scripts, not languages: `en` is every Latin letter, so French too; Japanese and Chinese share Han, and
where sets overlap the biases add up. A token that is only a piece of a UTF-8 character cannot be told by its
text and belongs to no set, so a model may still spell a character out byte by byte; a piece beside whole characters is
judged by those. Added tokens (end of text, chat marks) belong to no set either: `en=-inf` must not forbid the end.
"""

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from forerun.errors import ForerunError
from forerun.sample.parameters import LARGEST_BIAS

Ranges = tuple[tuple[int, int], ...]

HIRAGANA: Ranges = ((0x3041, 0x309F), (0x1B001, 0x1B11F))
KATAKANA: Ranges = ((0x30A0, 0x30FF), (0x31F0, 0x31FF), (0xFF66, 0xFF9D))
HAN: Ranges = ((0x3005, 0x3007), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x323AF))
HANGUL: Ranges = (
    (0x1100, 0x11FF),
    (0x3131, 0x318E),
    (0xA960, 0xA97F),
    (0xAC00, 0xD7FF),
    (0xFFA0, 0xFFDC),
)
LATIN: Ranges = (
    (0x41, 0x5A),
    (0x61, 0x7A),
    (0xAA, 0xAA),
    (0xBA, 0xBA),
    (0xC0, 0x2AF),
    (0x1D00, 0x1D25),
    (0x1E00, 0x1EFF),
    (0x2C60, 0x2C7F),
    (0xA722, 0xA7FF),
    (0xAB30, 0xAB64),
    (0xFB00, 0xFB06),
    (0xFF21, 0xFF3A),
    (0xFF41, 0xFF5A),
)
CYRILLIC: Ranges = ((0x400, 0x52F), (0x1C80, 0x1C8F), (0x2DE0, 0x2DFF), (0xA640, 0xA69F))
ARABIC: Ranges = ((0x600, 0x6FF), (0x750, 0x77F), (0x870, 0x8FF), (0xFB50, 0xFDFF), (0xFE70, 0xFEFC))
THAI: Ranges = ((0xE01, 0xE5B),)
DEVANAGARI: Ranges = ((0x900, 0x97F), (0xA8E0, 0xA8FF))
HEBREW: Ranges = ((0x591, 0x5F4), (0xFB1D, 0xFB4F))
GREEK: Ranges = ((0x370, 0x3FF), (0x1F00, 0x1FFF))

SCRIPTS: Mapping[str, Ranges] = {
    "ja": HIRAGANA + KATAKANA + HAN,
    "zh": HAN,
    "ko": HANGUL,
    "en": LATIN,
    "ru": CYRILLIC,
    "ar": ARABIC,
    "th": THAI,
    "hi": DEVANAGARI,
    "he": HEBREW,
    "el": GREEK,
}


def parse_language_bias(text: str) -> dict[str, float]:
    """The biases by language code.

    >>> parse_language_bias("ja=-inf,zh=-5")
    {'ja': -inf, 'zh': -5.0}
    """
    biases: dict[str, float] = {}
    for part in text.split(","):
        code, _, number = (piece.strip() for piece in part.partition("="))
        if code not in SCRIPTS:
            raise ForerunError(f"lang-bias knows no language {code!r}: write CODE=BIAS with {', '.join(SCRIPTS)}")
        if code in biases:
            raise ForerunError(f"lang-bias names {code} twice: give each language one bias")
        biases[code] = _bias(code, number)
    return biases


def _bias(code: str, number: str) -> float:
    try:
        bias = float(number)
    except ValueError:
        bias = math.nan
    if math.isnan(bias) or bias > LARGEST_BIAS:
        raise ForerunError(f"lang-bias {code}={number}: the bias must be a number or -inf, for example {code}=-5")
    return bias


def language_bias(tokenizer: Any, spec: str | Mapping[str, float]) -> dict[int, float]:
    """Logit bias by token id, for a transformers tokenizer and a spec such as "ja=-inf,zh=-5"."""
    biases = parse_language_bias(spec) if isinstance(spec, str) else dict(spec)
    texts = token_texts(tokenizer)
    result: dict[int, float] = {}
    for code, bias in biases.items():
        for token in tokens_of(code, texts):
            result[token] = result.get(token, 0.0) + bias
    return result


def token_texts(tokenizer: Any) -> list[str]:
    """The text of every token by itself; empty for added tokens. Bytes that are no whole character come as U+FFFD."""
    size = len(tokenizer)
    texts: list[str] = tokenizer.backend_tokenizer.decode_batch([[i] for i in range(size)], skip_special_tokens=False)
    for token in tokenizer.added_tokens_decoder:
        if token < size:
            texts[token] = ""
    return texts


def tokens_of(code: str, texts: Iterable[str]) -> list[int]:
    """The ids whose text holds a letter or mark of the language's scripts."""
    letters = re.compile("[" + "".join(f"{chr(first)}-{chr(last)}" for first, last in SCRIPTS[code]) + "]")
    return [token for token, text in enumerate(texts) if any(map(_is_letter, letters.findall(text)))]


def _is_letter(character: str) -> bool:
    """Letters and marks, and 〇, a numeral that is written like a letter; not digits or punctuation of a script."""
    return unicodedata.category(character)[0] in "LM" or character == "〇"
