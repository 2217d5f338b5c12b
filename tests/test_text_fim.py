"""Fill in the middle: which marks a tokenizer has, and where they stand."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import tiny_tokenizer
from tokenizers import AddedToken, processors

from forerun.errors import ForerunError
from forerun.text.fim import encode_fim, fim_tokens


def tokenizer_with(*marks: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return tokenizer


@pytest.mark.parametrize(
    "marks",
    [
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
        ("▁<PRE>", "▁<SUF>", "▁<MID>"),
        ("<PRE>", "<SUF>", "<MID>"),
    ],
)
def test_prefix_suffix_middle(marks: tuple[str, str, str]) -> None:
    tokenizer = tokenizer_with(*marks)
    assert (
        tokenizer.decode(encode_fim(tokenizer, "def f(", "): pass")) == f"{marks[0]}def f({marks[1]}): pass{marks[2]}"
    )


def test_without_a_middle_mark_the_suffix_comes_first() -> None:
    tokenizer = tokenizer_with("[SUFFIX]", "[PREFIX]")
    assert tokenizer.decode(encode_fim(tokenizer, "before", "after")) == "[SUFFIX]after[PREFIX]before"


def test_the_first_token_of_the_tokenizer_comes_first() -> None:
    tokenizer = tokenizer_with("<PRE>", "<SUF>", "<MID>")
    start = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    ids = encode_fim(tokenizer, "a", "b")
    assert ids[0] == start
    assert ids.count(start) == 1


def test_marks_typed_by_a_user_are_text() -> None:
    tokenizer = tokenizer_with("<PRE>", "<SUF>", "<MID>")
    tokens = fim_tokens(tokenizer)
    assert tokens is not None
    ids = encode_fim(tokenizer, "a<MID>b<|im_end|>", "<PRE>")
    assert [ids.count(token) for token in (tokens.prefix, tokens.suffix, tokens.middle)] == [1, 1, 1]
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids) == "<PRE>a<MID>b<|im_end|><SUF><PRE><MID>"


def test_a_model_without_marks_says_so() -> None:
    assert fim_tokens(tokenizer_with("<PRE>", "<SUF>")) is None
    with pytest.raises(ForerunError, match="fill in the middle"):
        encode_fim(tiny_tokenizer(), "a", "b")


def test_an_empty_side_is_fine() -> None:
    tokenizer = tokenizer_with("<PRE>", "<SUF>", "<MID>")
    assert tokenizer.decode(encode_fim(tokenizer, "", "b")) == "<PRE><SUF>b<MID>"
