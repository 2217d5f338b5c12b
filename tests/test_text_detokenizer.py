"""Incremental text against the tokenizer's own decode of the whole, on tokenizers made on the spot."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forerun.text.detokenizer import REPLACEMENT, Detokenizer, byte_spelling

SPECIALS = ["<unk>", "<s>", "</s>"]


def wrap(backend: Tokenizer) -> Any:
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def byte_level(decoder: Any) -> Any:
    """256 bytes, merges that cross characters, an added token with spaces and one that is not Latin."""
    pairs = [("h", "e"), ("Ġ", "t"), ("Ġt", "he"), ("ð", "Ł"), ("ðŁ", "ĺ"), ("a", "â"), ("Ĥ", "¬"), ("¬", "Ġt")]
    pieces = SPECIALS + sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += [left + right for left, right in pairs]
    backend = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoder
    backend.add_tokens([AddedToken("<a thought>", special=False), AddedToken("日本", special=False)])
    return wrap(backend)


def sentencepiece(decoder: Any) -> Any:
    pairs = [("▁", "a"), ("▁", "b"), ("▁a", "b")]
    pieces = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "é"]
    pieces += [left + right for left, right in pairs]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoder
    return wrap(backend)


LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
GEMMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
BYTES = byte_level(decoders.ByteLevel())
BYTES_IN_SEQUENCE = byte_level(decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]))
PIECES = {
    "llama": sentencepiece(LLAMA),
    "gemma": sentencepiece(GEMMA),
    "metaspace": sentencepiece(decoders.Metaspace(prepend_scheme="always")),
}


def pieces_of(tokenizer: Any, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [])
    return [*(detokenizer.push(token) for token in ids), detokenizer.held()]


def decode(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def test_byte_alphabet_is_the_librarys() -> None:
    assert set(byte_spelling()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_spelling().values()) == list(range(256))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, len(BYTES) - 1), max_size=30), st.lists(st.integers(0, len(BYTES) - 1), max_size=3))
def test_byte_level_equals_decode_for_any_tokens(ids: list[int], prompt: list[int]) -> None:
    assert "".join(pieces_of(BYTES, ids, prompt)) == decode(BYTES, ids)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20))
def test_byte_level_shows_whole_characters_as_soon_as_they_are_complete(text: str) -> None:
    ids = encode(BYTES, text)
    detokenizer = Detokenizer(BYTES)
    shown = ""
    for count, token in enumerate(ids, start=1):
        shown += detokenizer.push(token)
        complete = decode(BYTES, ids[:count])
        if REPLACEMENT not in text:
            assert shown == complete.rstrip(REPLACEMENT)
    assert shown + detokenizer.held() == text


@pytest.mark.parametrize("tokenizer", [BYTES, BYTES_IN_SEQUENCE, PIECES["llama"], PIECES["gemma"]])
def test_emoji_over_several_tokens_comes_with_the_last(tokenizer: Any) -> None:
    ids = encode(tokenizer, "😀")
    assert len(ids) > 1
    pieces = pieces_of(tokenizer, ids, encode(tokenizer, "ab"))
    assert "".join(pieces[:-2]).strip() == ""
    assert pieces[-2:] == ["😀", ""]


@pytest.mark.parametrize("tokenizer", [BYTES, BYTES_IN_SEQUENCE, PIECES["llama"], PIECES["gemma"]])
def test_a_character_of_four_tokens(tokenizer: Any) -> None:
    prompt, ids = encode(tokenizer, "b"), encode(tokenizer, "a𐍈b")[-6:]
    detokenizer = Detokenizer(tokenizer, prompt)
    pieces, ends = [], []
    for token in ids:
        pieces.append(detokenizer.push(token))
        ends.append(detokenizer.held())  # looking does not change what comes
    assert [pieces[0].strip(), *pieces[1:]] == ["a", "", "", "", "𐍈", "b"]
    assert list(map(bool, ends)) == [False, True, True, True, False, False]


@pytest.mark.parametrize("tokenizer", [BYTES, BYTES_IN_SEQUENCE, PIECES["llama"], PIECES["gemma"]])
def test_an_unfinished_character_comes_out_of_the_flush_as_decode_has_it(tokenizer: Any) -> None:
    ids = encode(tokenizer, "a😀")[:-1]
    pieces = pieces_of(tokenizer, ids)
    assert REPLACEMENT not in "".join(pieces[:-1])
    assert REPLACEMENT in pieces[-1]
    assert "".join(pieces) == decode(tokenizer, ids)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, len(BYTES_IN_SEQUENCE) - 1), max_size=12))
def test_unknown_pipelines_never_lose_ascii(ids: list[int]) -> None:
    text = "".join(pieces_of(BYTES_IN_SEQUENCE, ids))
    letters = [character for character in decode(BYTES_IN_SEQUENCE, ids) if character.isascii()]
    assert [character for character in text if character.isascii()] == letters


EURO = "<0xE2> <0x82> <0xAC>"
WORDS = st.lists(st.sampled_from(["a", "b", " ", "ab", "é", "€", "😀", "\n"]), max_size=10).map("".join)


@pytest.mark.parametrize("name", ["llama", "gemma"])
@settings(max_examples=80, deadline=None)
@given(prompt=WORDS, answer=WORDS)
def test_sentencepiece_text_is_what_the_answer_adds_to_the_prompt(name: str, prompt: str, answer: str) -> None:
    tokenizer = PIECES[name]
    before = encode(tokenizer, prompt)
    ids = encode(tokenizer, prompt + answer)
    if ids[: len(before)] != before:  # a merge across the border: not a continuation
        return
    whole = decode(tokenizer, ids)
    added = whole[len(decode(tokenizer, before)) :]
    assert "".join(pieces_of(tokenizer, ids[len(before) :], before)) == added


@pytest.mark.parametrize("name", list(PIECES))
@settings(max_examples=80, deadline=None)
@given(words=st.lists(st.sampled_from(["▁", "a", "é", "▁a", "▁ab", "</s>", "<0x20>", "<0x0A>", EURO]), max_size=8))
def test_without_a_prompt_it_is_decode_with_its_leading_space_rule(name: str, words: list[str]) -> None:
    tokenizer = PIECES[name]
    tokens: list[int] = tokenizer.convert_tokens_to_ids(" ".join(words).split())
    assert "".join(pieces_of(tokenizer, tokens)) == decode(tokenizer, tokens)


@pytest.mark.parametrize("name", list(PIECES))
def test_the_space_before_the_first_word_depends_on_the_prompt(name: str) -> None:
    tokenizer = PIECES[name]
    answer = tokenizer.convert_tokens_to_ids(["▁a", "▁b"])
    prompt = tokenizer.convert_tokens_to_ids(["<s>", "b", "</s>"])
    bos_only = tokenizer.convert_tokens_to_ids(["<s>"])
    assert "".join(pieces_of(tokenizer, answer, prompt)) == " a b"
    assert "".join(pieces_of(tokenizer, answer, bos_only)) == (" a b" if name == "gemma" else "a b")


def test_good_characters_in_a_broken_run_of_byte_tokens_stay() -> None:
    tokenizer = PIECES["llama"]
    run = [f"<0x{byte:02X}>" for byte in "€".encode()] + ["<0xFF>", "<0xE2>", "a", "▁a"]
    pieces = pieces_of(tokenizer, tokenizer.convert_tokens_to_ids(run), tokenizer.convert_tokens_to_ids(["b"]))
    assert pieces == ["", "", "€", REPLACEMENT, "", REPLACEMENT + "a", " a", ""]


def test_broken_bytes_are_not_held_for_ever() -> None:
    broken = [BYTES.convert_tokens_to_ids("ÿ")] * 12
    for tokenizer in (BYTES, BYTES_IN_SEQUENCE):
        pieces = pieces_of(tokenizer, broken)
        assert "".join(pieces) == REPLACEMENT * 12
        assert len(pieces[-1]) < 4


def test_special_tokens_give_no_text_and_do_not_cut_a_character() -> None:
    first, *rest = encode(BYTES, "€")
    end = BYTES.convert_tokens_to_ids("</s>")
    assert "".join(pieces_of(BYTES, [end, first, end, *rest, end])) == "€"


def test_ids_without_a_token_give_no_text() -> None:
    assert pieces_of(BYTES, [len(BYTES) + 5]) == ["", ""]
    assert pieces_of(PIECES["llama"], [len(PIECES["llama"]) + 5]) == ["", ""]


@pytest.mark.parametrize("tokenizer", [BYTES, *PIECES.values()], ids=["bytes", *PIECES])
def test_special_tokens_that_are_asked_for_give_their_text(tokenizer: Any) -> None:
    ids = tokenizer("a b", add_special_tokens=False)["input_ids"]
    start, end = tokenizer.convert_tokens_to_ids(["<s>", "</s>"])
    detokenizer = Detokenizer(tokenizer, [], shown={"</s>"})
    text = "".join(detokenizer.push(token) for token in [*ids, start, end, *ids, end])
    plain = tokenizer.decode(ids)
    with_space = tokenizer.decode([*ids, *ids])[len(plain) :]
    assert text == f"{plain}</s>{with_space}</s>"


def test_a_shown_token_ends_an_unfinished_character() -> None:
    end = BYTES.convert_tokens_to_ids("</s>")
    broken = BYTES.convert_tokens_to_ids("ð")
    detokenizer = Detokenizer(BYTES, [], shown={"</s>"})
    assert [detokenizer.push(token) for token in (broken, end)] == ["", f"{REPLACEMENT}</s>"]
