"""The tokenizer inside a GGUF file, saved the way Hugging Face saves one."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError, first_line
from forerun.weights.folder import system_errors, write_json
from forerun.weights.generation_config import sampling_defaults
from forerun.weights.gguf_header import GgufHeader
from forerun.weights.gguf_metadata import Metadata
from forerun.weights.tokenizer import check_template

# Ways to cut text before merging (`tokenizer.ggml.pre`) that split every digit off, then work like GPT-2.
# transformers leaves them at plain GPT-2, which gives other tokens for two spaces before a digit.
DIGIT_SPLITTERS = frozenset({"smollm", "starcoder", "refact", "codeshell", "command-r"})
PLAIN_SPLITTERS = frozenset({"default", "gpt-2", "gpt2"})
# llama.cpp puts the begin token first for these when the file does not say.
BEGIN_BY_DEFAULT = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
# What files of Qwen models leave unsaid about their tokens, and Hugging Face's files of the same models say.
QWEN = frozenset({"qwen2", "qwen3", "qwen35", "qwen35moe"})
COMPOSED = frozenset({"qwen2", "qwen35"})  # ways to cut text whose models compose characters first
END_OF_TEXT = "<|endoftext|>"  # ends a text as <|im_end|> ends an answer; files name only one of them
UNUSED = 5  # a type of token
LOADER_LEFTOVERS = ("is_local", "local_files_only", "gguf_file", "name_or_path")


def write_tokenizer(header: GgufHeader, source: Path, folder: Path, vocab_size: int) -> Any:
    """Converts the file's tokenizer (by way of transformers), saves it with its chat template, and returns it."""
    if "tokenizer.ggml.tokens" not in header.metadata:
        raise ForerunError(f"{source} carries no tokenizer, so it cannot be used on its own")
    check_template(header.metadata.get("tokenizer.chat_template"), f"{source}: metadata tokenizer.chat_template")
    tokenizer = _load(header, source)
    if len(tokenizer) > vocab_size:
        raise ForerunError(f"{source}: its tokenizer has {len(tokenizer)} tokens, its embedding only {vocab_size} rows")
    _set_splitter(tokenizer, header, source)
    _set_first_space(tokenizer, header)
    with system_errors(folder):
        tokenizer.save_pretrained(folder)
    _tidy(folder / "tokenizer_config.json")
    return tokenizer


def generation_config(header: GgufHeader, tokenizer: Any | None) -> dict[str, Any]:
    """The ids that end an answer: end of text, end of turn, end of message; those that never come; how to sample."""
    metadata = Metadata(header, "")
    ends = {metadata.token("eos"), metadata.token("eot"), metadata.token("eom")} - {None}
    listed = header.metadata.get("tokenizer.ggml.suppress_tokens")
    never = list(listed) if isinstance(listed, tuple) else []
    if metadata.architecture in QWEN:
        if tokenizer is not None and END_OF_TEXT in (known := tokenizer.get_added_vocab()):
            ends.add(known[END_OF_TEXT])
        types = header.metadata.get("tokenizer.ggml.token_type")
        # Ids that fill the vocabulary up: Hugging Face's tokenizer does not have them, so they never come.
        never += [token for token, kind in enumerate(types if isinstance(types, tuple) else ()) if kind == UNUSED]
    config: dict[str, Any] = {"bos_token_id": metadata.token("bos"), "eos_token_id": sorted(ends)}
    config |= sampling_defaults(header.metadata)
    return config | ({"suppress_tokens": never} if never else {})


def _load(header: GgufHeader, source: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    # An otherwise empty folder, so that no tokenizer.json beside the file is taken in its place.
    with tempfile.TemporaryDirectory() as empty:
        (Path(empty) / "model.gguf").symlink_to(source.resolve())
        try:
            return PreTrainedTokenizerFast.from_pretrained(
                empty, gguf_file="model.gguf", add_bos_token=_begins(header), local_files_only=True
            )
        except Exception as error:  # transformers and tokenizers raise anything for a bad vocabulary
            raise ForerunError(f"{source}: its tokenizer cannot be read ({first_line(error)})") from error


def _begins(header: GgufHeader) -> bool:
    stated = header.metadata.get("tokenizer.ggml.add_bos_token")
    if isinstance(stated, bool):
        return stated
    sentencepiece = header.metadata.get("tokenizer.ggml.model") == "llama"
    return sentencepiece or header.metadata.get("tokenizer.ggml.pre") in BEGIN_BY_DEFAULT


def _set_splitter(tokenizer: Any, header: GgufHeader, source: Path) -> None:
    """Byte-level tokenizers only: the others carry their way of cutting text in their kind."""
    if header.metadata.get("tokenizer.ggml.model") != "gpt2":
        return
    splitter = header.metadata.get("tokenizer.ggml.pre", "default")
    if splitter in DIGIT_SPLITTERS:
        from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    elif splitter not in PLAIN_SPLITTERS and splitter not in _known_to_transformers():
        raise ForerunError(
            f"{source}: its tokenizer cuts text in a way that is not known here ({str(splitter)[:40]!r}); "
            "use the model's safetensors folder"
        )
    if splitter in COMPOSED:
        from tokenizers.normalizers import NFC

        tokenizer.backend_tokenizer.normalizer = NFC()


def _set_first_space(tokenizer: Any, header: GgufHeader) -> None:
    """Sentencepiece puts a space before a text unless a file says otherwise, which transformers does not read."""
    from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence
    from tokenizers.pre_tokenizers import Metaspace

    backend = tokenizer.backend_tokenizer
    if isinstance(backend.pre_tokenizer, Metaspace) and header.metadata.get("tokenizer.ggml.add_space_prefix") is False:
        backend.pre_tokenizer = Metaspace(prepend_scheme="never", split=False)
        backend.decoder = Sequence([Replace("▁", " "), ByteFallback(), Fuse()])


def _known_to_transformers() -> frozenset[str]:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:  # releases before this table chose by architecture
        return frozenset({"llama-bpe", "qwen2"})
    return frozenset(GGUF_PRE_TOKENIZER_SPLITS)


def _tidy(file: Path) -> None:
    """Drops what the loader noted about itself."""
    settings = json.loads(file.read_text(encoding="utf-8"))
    write_json(file, {key: value for key, value in settings.items() if key not in LOADER_LEFTOVERS})
