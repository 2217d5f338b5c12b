"""The tokenizer of a model folder, and the tokens that end an answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import ForerunError, first_line
from forerun.weights.described import described
from forerun.weights.folder import file_inside, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# What chat templates put behind a turn. A model may produce it even where its config names another end.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endofturn|>", "<end_of_turn>", "<|end_of_turn|>")
NEEDS_BOS = "gemma"  # families by the beginning of their model type
READ_BY_TRANSFORMERS = ("chat_template.jinja", "special_tokens_map.json", "added_tokens.json")


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a model with its chat template: a `Tokenizer`, or transformers' own, which does as much."""
    if path.is_file():
        from forerun.weights.gguf_tokenizer import gguf_tokenizer

        tokenizer: Any = gguf_tokenizer(path)
    else:
        tokenizer = _from_folder(path)
    if str((described(path, "config.json") or {}).get("model_type")).startswith(NEEDS_BOS):
        begin_with_bos(tokenizer)
    return tokenizer


def _from_folder(path: Path) -> PreTrainedTokenizerFast:
    """The fast tokenizer, exactly as tokenizer.json describes it; no code from the folder."""
    settings = read_json(path, "tokenizer_config.json") or {}
    if settings.get("auto_map"):
        raise ForerunError(f"{path}: tokenizer_config.json asks for code from the model folder ('auto_map'); never run")
    for name in READ_BY_TRANSFORMERS:
        file_inside(path, name)  # refuses links that leave the folder
    if file_inside(path, "tokenizer.json") is None:
        raise ForerunError(f"{path} has no tokenizer.json; save the model's fast tokenizer there (save_pretrained)")
    # Not AutoTokenizer: it takes a second longer to import, reads config.json, and rebuilds some tokenizers from parts.
    from transformers import PreTrainedTokenizerFast

    family = str((read_json(path, "config.json") or {}).get("model_type"))
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            path,
            # transformers takes every config without its own version for a Mistral of before its fix, and warns.
            fix_mistral_regex=None if "stral" in family else False,
            local_files_only=True,
            trust_remote_code=False,
            model_max_length=sys.maxsize,  # the engine knows the context, and a file may hold anything
        )
    except Exception as error:  # transformers and tokenizers raise anything for a bad file
        raise ForerunError(f"{path}: its tokenizer cannot be read ({first_line(error)})") from error
    check_template(tokenizer.chat_template, f"{path}: chat_template of its tokenizer")
    return tokenizer


def check_template(template: object, where: str) -> None:
    """Text, several texts by name, or none."""
    texts = template.values() if isinstance(template, dict) else [] if template is None else [template]
    if not all(isinstance(text, str) for text in texts):
        raise ForerunError(f"{where} must be text, found {str(template)[:40]}")


def begin_with_bos(tokenizer: Any) -> None:
    """Let plain text begin with BOS, which chat templates write themselves: without it these models write nonsense."""
    from tokenizers.processors import Sequence, TemplateProcessing

    bos, number = tokenizer.bos_token, tokenizer.bos_token_id
    if bos is None or tokenizer("a", verbose=False)["input_ids"][:1] == [number]:
        return
    backend = tokenizer.backend_tokenizer
    before = [] if backend.post_processor is None else [backend.post_processor]
    first = TemplateProcessing(single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, number)])
    backend.post_processor = Sequence([*before, first])


def stop_token_ids(path: Path, tokenizer: Any) -> frozenset[int]:
    """Every token that ends an answer: config, generation config, tokenizer, and the chat template's end of turn."""
    config = described(path, "config.json") or {}
    nested = config.get("text_config")
    sources = [config, nested if isinstance(nested, dict) else {}, described(path, "generation_config.json") or {}]
    ends: set[int] = set()
    for source in sources:
        ends |= _ids(source.get("eos_token_id"), path)
    ends |= _ids(tokenizer.eos_token_id, path)
    return frozenset(ends | turn_ends(tokenizer))


def _ids(value: object, path: Path) -> set[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ForerunError(f"{path}: eos_token_id must be a token id or a list of them, not {str(value)[:60]!r}")
    return set(ids)


def turn_ends(tokenizer: Any) -> set[int]:
    """What the chat template puts behind a turn."""
    template = tokenizer.chat_template
    text = "".join(template.values()) if isinstance(template, dict) else template or ""
    added = tokenizer.get_added_vocab()
    return {added[token] for token in TURN_ENDS if token in text and token in added}
