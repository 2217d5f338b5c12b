"""Tokens into text, one at a time, never inside a character.

The text of an answer is what decoding prompt and answer together adds to decoding the prompt: tokenizers that drop the
first space of a text (sentencepiece and its kin) keep the space in front of the answer's first word. Special tokens
give no text, but for those that are asked for: tool calls and thinking are marked with some.
`clean_up_tokenization_spaces` is off: it rewrites text already shown, and spoils code.

Two ways. Byte-level tokenizers (GPT-2, Llama 3, Qwen, SmolLM ...) write bytes: each token's bytes go through an
incremental UTF-8 decoder, and the answer's text equals `tokenizer.decode(answer)` to the letter, broken bytes included.
All others are decoded with the tokens before them as context; their byte-fallback tokens (`<0xE2>`) go through the same
UTF-8 decoder. One difference there: the tokenizer turns a whole run of such tokens into replacement characters when
any byte of the run is broken, this one replaces the broken bytes only, since the good characters are shown already.
(`tokenizers.DecodeStream` raises an error on such a run, and cannot be flushed.)
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LONGEST_CHARACTER = 4  # bytes in UTF-8, and so tokens in one character


class Detokenizer:
    """Text of one answer as its tokens arrive. Joined, the pieces and what is held at the end are its text.

    `push` gives complete characters only: a character spread over several tokens comes with the last of them. What is
    held back at the end, `held` shows; the answer may go on after that as if nobody had looked.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int] = (), shown: Collection[str] = ()
    ) -> None:
        """`shown`: special tokens that do give their text."""
        vocabulary = _vocabulary(tokenizer.backend_tokenizer)
        self._special = vocabulary.special
        self._shown = {index: text for index, text in self._special.items() if text in shown} if shown else {}
        self._text: _TextSource
        if vocabulary.decoders == ["ByteLevel"]:
            self._text = _ByteLevelText(vocabulary.pieces)
        else:
            with_text = (index for index in reversed(prompt_ids) if index not in self._special)
            context = list(islice(with_text, 1))
            self._text = _ContextText(tokenizer, context, byte_fallback="ByteFallback" in vocabulary.decoders)

    def push(self, token: int) -> str:
        """The characters that this token completes; empty for special tokens and in the middle of a character."""
        if token in self._shown:
            return self._text.interrupt() + self._shown[token]
        return "" if token in self._special else self._text.push(token)

    def held(self) -> str:
        """What the end of the answer would add: replacement characters for an unfinished character. It may go on."""
        return self._text.held()


class _TextSource(Protocol):
    def push(self, token: int) -> str: ...

    def held(self) -> str: ...

    def interrupt(self) -> str:
        """What was held, as it will stay: a token of another kind comes."""
        ...


class _Utf8:
    """Incremental UTF-8. Broken bytes become one mark per broken sequence, or one per byte as byte fallback does."""

    def __init__(self, *, mark_every_byte: bool) -> None:
        # surrogateescape turns each broken byte into one lone surrogate, which is then easy to replace
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape" if mark_every_byte else "replace")

    @property
    def waits(self) -> bool:
        """Are there bytes without the rest of their character?"""
        return bool(self._decoder.getstate()[0])

    def push(self, data: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        return re.sub("[\udc80-\udcff]", REPLACEMENT, text)

    def held(self) -> str:
        """Marks for bytes that wait for the rest of their character."""
        state = self._decoder.getstate()
        text = self.push(b"", final=True)
        self._decoder.setstate(state)
        return text

    def flush(self) -> str:
        """The same, and they wait no longer."""
        text = self.held()
        self._decoder.reset()
        return text


class _Pieces(dict[int, str | bytes]):
    """By token what it spells, looked up once: its text where it has whole characters only, else its bytes."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._backend, self._byte_of = backend, byte_spelling()

    def __missing__(self, token: int) -> str | bytes:
        data = spelled_bytes(self._backend.id_to_token(token) or "", self._byte_of)
        try:
            self[token] = data.decode()
        except UnicodeDecodeError:
            self[token] = data
        return self[token]


@dataclass(frozen=True)
class _Vocabulary:
    """What all answers of a tokenizer share."""

    special: dict[int, str]
    decoders: list[str]
    pieces: _Pieces


@lru_cache(maxsize=8)
def _vocabulary(backend: Any) -> _Vocabulary:
    added = backend.get_added_tokens_decoder()
    special = {index: token.content for index, token in added.items() if token.special}
    return _Vocabulary(special, decoder_names(backend), _Pieces(backend))


class _ByteLevelText:
    """Byte-level tokenizers: every token is bytes, spelled with one printable character each."""

    def __init__(self, pieces: _Pieces) -> None:
        self._pieces = pieces
        self._utf8 = _Utf8(mark_every_byte=False)

    def push(self, token: int) -> str:
        piece = self._pieces[token]
        if isinstance(piece, str):
            if not self._utf8.waits:
                return piece
            piece = piece.encode()
        return self._utf8.push(piece)

    def held(self) -> str:
        return self._utf8.held()

    def interrupt(self) -> str:
        return self._utf8.flush()


class _ContextText:
    """Every other tokenizer: a token's text is what it adds to the text of the tokens just before it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: list[int], *, byte_fallback: bool) -> None:
        self._tokenizer = tokenizer
        self._context = context
        self._waiting: list[int] = []
        self._byte_fallback = byte_fallback
        self._utf8 = _Utf8(mark_every_byte=True)

    def push(self, token: int) -> str:
        data = self._fallback_byte(token)
        # A first token that is a plain space goes the ordinary way: the tokenizer may drop it.
        if data is not None and (self._context or not data.isascii()):
            text = self._show_waiting() + self._utf8.push(data)
            self._context = [token]
            return text
        text = self._utf8.flush()
        self._waiting.append(token)
        if self._fresh_text().endswith(REPLACEMENT) and len(self._waiting) < _LONGEST_CHARACTER:
            return text
        return text + self._show_waiting()

    def held(self) -> str:
        return (self._fresh_text() if self._waiting else "") + self._utf8.held()

    def interrupt(self) -> str:
        return self._show_waiting() + self._utf8.flush()

    def _fallback_byte(self, token: int) -> bytes | None:
        if not self._byte_fallback:
            return None
        return fallback_byte(self._tokenizer.backend_tokenizer.id_to_token(token) or "")

    def _fresh_text(self) -> str:
        return self._decode(self._context + self._waiting)[len(self._decode(self._context)) :]

    def _show_waiting(self) -> str:
        if not self._waiting:
            return ""
        text = self._fresh_text()
        self._context, self._waiting = self._waiting, []
        return text

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def decoder_names(backend: Any) -> list[str]:
    """The kinds of decoder in the tokenizer's decoding pipeline, in order."""
    if backend.decoder is None:
        return []
    described = json.loads(backend.decoder.__getstate__())
    steps = described["decoders"] if described["type"] == "Sequence" else [described]
    return [step["type"] for step in steps]


def fallback_byte(spelled: str) -> bytes | None:
    """What a byte-fallback token such as `<0xE2>` stands for; None: it is another kind of token."""
    found = _BYTE_TOKEN.fullmatch(spelled)
    return bytes.fromhex(found[1]) if found else None


def spelled_bytes(spelled: str, byte_of: Mapping[str, int]) -> bytes:
    """A token's bytes, in the byte-level alphabet or, as added tokens are, in plain characters."""
    try:
        return bytes([byte_of[character] for character in spelled])
    except KeyError:
        return spelled.encode()


def byte_spelling() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 characters stand for themselves, the others for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
