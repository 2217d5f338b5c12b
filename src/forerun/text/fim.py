"""Fill in the middle: a prompt before and a suffix behind a gap, for models that have tokens for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forerun.errors import ForerunError
from forerun.text.guarded import check_unicode, encode_plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The marks of the prefix, the suffix and the middle, as families spell them. What comes first is the prefix, but for
# Mistral, whose models read the suffix first and go on where the prefix ends.
_SPELLINGS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("[PREFIX]", "[SUFFIX]", None),  # Codestral
)


@dataclass(frozen=True, slots=True)
class FimTokens:
    """Ids of the marks."""

    prefix: int
    suffix: int
    middle: int | None  # None: the suffix comes first, and the answer goes on after the prefix


def fim_tokens(tokenizer: PreTrainedTokenizerBase) -> FimTokens | None:
    """The marks of this model, or None: it cannot fill gaps."""
    id_of = tokenizer.backend_tokenizer.token_to_id
    for prefix, suffix, middle in _SPELLINGS:
        first, second = id_of(prefix), id_of(suffix)
        last = id_of(middle) if middle is not None else None
        if first is not None and second is not None and (middle is None or last is not None):
            return FimTokens(first, second, last)
    return None


def encode_fim(tokenizer: PreTrainedTokenizerBase, prompt: str, suffix: str) -> list[int]:
    """Token ids of a prompt that asks for what stands between the two. Control tokens in them are text."""
    tokens = fim_tokens(tokenizer)
    if tokens is None:
        raise ForerunError("this model has no tokens to fill in the middle; leave out the suffix")
    check_unicode([prompt, suffix])
    begin: list[int] = tokenizer("", verbose=False)["input_ids"]  # BOS, where the tokenizer puts one
    end = tokenizer.eos_token_id
    if begin and begin[-1] == end and end != tokenizer.bos_token_id:
        begin = begin[:-1]
    before = encode_plain(tokenizer, prompt, first=True)
    after = encode_plain(tokenizer, suffix, first=False)
    if tokens.middle is None:
        return [*begin, tokens.suffix, *after, tokens.prefix, *before]
    return [*begin, tokens.prefix, *before, tokens.suffix, *after, tokens.middle]
