"""Single tokens as text and bytes: what lists of log probabilities show."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from forerun.text.detokenizer import byte_spelling, decoder_names, fallback_byte, spelled_bytes

_WORD_START = "▁"  # a space, in sentencepiece's spelling


class TokenBytes:
    """Bytes of tokens, looked up once each. A token may hold part of a character; special tokens are their names."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._byte_of = byte_spelling() if "ByteLevel" in decoder_names(self._backend) else None
        self._added = frozenset(self._backend.get_added_tokens_decoder())
        self._known: dict[int, tuple[str, bytes]] = {}

    def of(self, token: int) -> tuple[str, bytes]:
        """Text, with marks for broken characters, and bytes."""
        found = self._known.get(token)
        if found is None:
            data = self._bytes(token)
            found = self._known[token] = (data.decode(errors="replace"), data)
        return found

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token, at least."""
        return max(len(spelled) for spelled in self._backend.get_vocab())

    def _bytes(self, token: int) -> bytes:
        spelled: str = self._backend.id_to_token(token) or ""
        if token in self._added:
            return spelled.encode()
        if self._byte_of is not None:
            return spelled_bytes(spelled, self._byte_of)
        return fallback_byte(spelled) or spelled.replace(_WORD_START, " ").encode()
