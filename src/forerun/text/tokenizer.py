"""A tokenizer: the `tokenizers` library's, with the names of its special tokens and the chat template of its model.

It answers as transformers' `PreTrainedTokenizerFast` does, which takes longer to import than a small model to load.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend


class Tokenizer:
    """From text to ids and back."""

    def __init__(
        self, backend: Backend, special: Mapping[str, str], chat_template: str | dict[str, str] | None = None
    ) -> None:
        """`special`: texts of special tokens by what they mean: "bos_token", "eos_token", …"""
        backend.no_padding()
        backend.no_truncation()
        self.backend_tokenizer = backend
        self.special_tokens_map = dict(special)
        self.chat_template = chat_template

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens_map.get("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._id(self.bos_token)

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens_map.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id(self.eos_token)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Tokens that are found in a text before it is cut."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    def get_added_vocab(self) -> dict[str, int]:
        return {token.content: number for number, token in sorted(self.added_tokens_decoder.items())}

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True  # and no need to count tokens for that

    def __call__(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        return_offsets_mapping: bool = False,
        verbose: bool = False,  # noqa: ARG002 - there is nothing to be told
    ) -> dict[str, Any]:
        """Ids, and where in the text they come from."""
        encoded = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        found: dict[str, Any] = {"input_ids": encoded.ids}
        return found | ({"offset_mapping": encoded.offsets} if return_offsets_mapping else {})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def decode(
        self,
        ids: Iterable[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,  # noqa: ARG002 - text is left as the tokens spell it
    ) -> str:
        return self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        return [self.backend_tokenizer.id_to_token(token) for token in ids]

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int | None]:
        return [self.backend_tokenizer.token_to_id(token) for token in tokens]

    def get_chat_template(self, chat_template: None = None, tools: Sequence[Any] | None = None) -> str:  # noqa: ARG002
        """The template as text; some models have one of their own for tools."""
        known = self.chat_template
        if isinstance(known, str):
            return known
        names = ["tool_use"] * (tools is not None) + ["default"]
        found = next((known[name] for name in names if known and name in known), None)
        if found is None:
            raise ValueError("no default chat template")
        return found

    def save(self, folder: Path) -> None:
        """As Hugging Face's files have it."""
        self.backend_tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        text = json.dumps(settings | self.special_tokens_map, indent=2) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
        if isinstance(self.chat_template, str):
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self.backend_tokenizer.token_to_id(token)
