"""What GGUF files of Qwen models leave unsaid about their tokens, and Hugging Face's files of the same models say."""

from __future__ import annotations

from typing import Any

from forerun.weights.gguf_metadata import Metadata

QWEN = frozenset({"qwen2", "qwen3", "qwen35", "qwen35moe"})
COMPOSED = frozenset({"qwen2", "qwen35"})  # ways to cut text whose models compose characters first
END_OF_TEXT = "<|endoftext|>"  # ends a text as <|im_end|> ends an answer; files name only one of them
UNUSED = 5  # a type of token


def unused_tokens(metadata: Metadata) -> list[int]:
    """Ids that fill the vocabulary up: Hugging Face's tokenizer does not have them, so they never come."""
    types = metadata.values.get("tokenizer.ggml.token_type")
    if metadata.architecture not in QWEN or not isinstance(types, tuple):
        return []
    return [token for token, kind in enumerate(types) if kind == UNUSED]


def ends_of_text(architecture: str, tokenizer: Any) -> list[int]:
    """The id of the token that ends a text, where there is one that the file does not name."""
    known = tokenizer.get_added_vocab()
    return [known[END_OF_TEXT]] if architecture in QWEN and END_OF_TEXT in known else []
