"""Tokenizers of GGUF files answer as transformers' do, and our `Tokenizer` as the class it stands for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
from chat_templates import BARE, MISTRAL, PARTS, QWEN, WEATHER, tokenizer_with
from tiny import MERGES, SPECIALS, tiny_gguf, tiny_model, tiny_tokenizer

from forerun.errors import ForerunError
from forerun.text.chat import encode_chat
from forerun.text.tokenizer import Tokenizer
from forerun.weights.gguf_tokenizer import SPLITTERS, gguf_tokenizer

TEXTS = (
    "the thing and  12 34\n\n it's",
    "हिन्दी ಕನ್ನಡ",
    "e\u0301te\u0301 漢字 😀\r\n\t x",
    " hello<|im_end|> hello <think>\n<s></s>",
    "",
    "HELLOWorld 'LL don't 1234567",
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", "h", "e", "l", "o", "▁h", "he", "ll", "▁he", "llo", "▁hello", "t", "th", "the", "▁the", "  ", "   "]


def theirs(file: Path, begins: bool) -> Any:
    """By way of transformers."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name, add_bos_token=begins)


def with_tokens(file: Path, architecture: str, kind: str, tokens: list[str], types: list[int], **keys: Any) -> Path:
    """A file with a tokenizer and next to nothing else."""
    import numpy as np

    file.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    for name, value in keys.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        add[type(value)](f"tokenizer.{name.replace('__', '.')}", value)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens) + 4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def check_alike(ours: Tokenizer, other: Any) -> None:
    mine, its = (json.loads(each.backend_tokenizer.to_str()) for each in (ours, other))
    for part in mine:
        assert mine[part] == its[part], part
    assert ours.special_tokens_map == other.special_tokens_map
    check_answers(ours, other)


def check_answers(ours: Tokenizer, other: Any) -> None:
    assert len(ours) == len(other) and ours.get_vocab() == other.get_vocab()
    assert ours.get_added_vocab() == other.get_added_vocab()
    assert ours.added_tokens_decoder.keys() == other.added_tokens_decoder.keys()
    assert (ours.bos_token_id, ours.eos_token_id) == (other.bos_token_id, other.eos_token_id)
    for text in TEXTS:
        for special in (True, False):
            found = ours(text, add_special_tokens=special, return_offsets_mapping=True)
            wanted = other(text, add_special_tokens=special, return_offsets_mapping=True)
            assert found["input_ids"] == wanted["input_ids"] == ours.encode(text, add_special_tokens=special)
            assert found["offset_mapping"] == wanted["offset_mapping"]
            ids = found["input_ids"]
            assert ours.convert_ids_to_tokens(ids) == other.convert_ids_to_tokens(ids)
            assert ours.decode(ids) == other.decode(ids)
            assert ours.decode(ids, skip_special_tokens=True) == other.decode(ids, skip_special_tokens=True)


def test_text_is_cut_as_transformers_knows_it() -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    assert SPLITTERS == GGUF_PRE_TOKENIZER_SPLITS


@pytest.mark.parametrize("splitter", ["default", "llama-bpe", "tekken", "gpt-4o", "qwen35"])
@pytest.mark.parametrize("begins", [True, False])
def test_byte_level_tokenizers(splitter: str, begins: bool, tmp_path: Path) -> None:
    plain = tiny_tokenizer()
    tokens = [*plain.convert_ids_to_tokens(range(len(plain))), "<think>", "Ġ<"]
    types = [3 if token in SPECIALS else 4 if token == "<think>" else 1 for token in tokens]
    keys = {"ggml__merges": [" ".join(merge.split()) for merge in MERGES.split(";")], "ggml__pre": splitter}
    keys |= {"ggml__bos_token_id": 1, "ggml__eos_token_id": 2, "ggml__padding_token_id": 10, "chat_template": "x"}
    file = with_tokens(tmp_path / "a.gguf", "llama", "gpt2", tokens, types, **keys, ggml__add_bos_token=begins)
    ours, other = gguf_tokenizer(file), theirs(file, begins)
    if splitter == "qwen35":  # characters are composed first, which transformers leaves out
        other.backend_tokenizer.normalizer = ours.backend_tokenizer.normalizer
    check_alike(ours, other)
    assert ours.chat_template == "x"


@pytest.mark.parametrize("begins", [True, False])
def test_sentencepiece_tokenizers(begins: bool, tmp_path: Path) -> None:
    tokens, types = ["<unk>", "<s>", "</s>", *BYTES, *PIECES, "<think>"], [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 4]
    keys = {"ggml__bos_token_id": 1, "ggml__eos_token_id": 2}
    file = with_tokens(tmp_path / "a.gguf", "llama", "llama", tokens, types, **keys, ggml__add_bos_token=begins)
    check_alike(gguf_tokenizer(file), theirs(file, begins))


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_tokenizers_of_gemma(kind: str, tmp_path: Path) -> None:
    first = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokens, types = [*first, *BYTES, *PIECES], [3, 3, 3, 2, 4, *[6] * 256, *[1] * len(PIECES)]
    keys: dict[str, Any] = {f"ggml__{name}_token_id": number for number, name in enumerate(("padding", "eos", "bos"))}
    if kind == "gemma4":
        keys["ggml__merges"] = ["h e", "l l", "▁ h", "▁h e", "ll o", "▁he llo"]
    model = "llama" if kind == "gemma3" else "gemma4"
    file = with_tokens(tmp_path / "a.gguf", kind, model, tokens, types, **keys, ggml__add_bos_token=True)
    check_alike(gguf_tokenizer(file), theirs(file, True))


def test_control_tokens_in_other_letters_are_found_whole(tmp_path: Path) -> None:
    """In plain characters among tokens that are spelled in the byte alphabet; transformers gives them new ids."""
    plain = tiny_tokenizer()
    tokens = [*plain.convert_ids_to_tokens(range(len(plain))), "<｜begin▁of▁sentence｜>"]
    types, begin = [3 if token in SPECIALS else 1 for token in tokens[:-1]] + [3], len(tokens) - 1
    keys = {"ggml__merges": ["h e"], "ggml__bos_token_id": begin, "ggml__add_bos_token": True}
    found = gguf_tokenizer(with_tokens(tmp_path / "a.gguf", "llama", "gpt2", tokens, types, **keys))
    assert len(found) == len(tokens) and found.encode("he") == [begin, found.get_vocab()["he"]]
    assert found.encode("<｜begin▁of▁sentence｜>", add_special_tokens=False) == [begin]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tokenizer__ggml__tokens": None}, "carries no tokenizer"),
        ({"tokenizer__ggml__merges": ["h"]}, "its tokenizer cannot be read"),
        ({"tokenizer__ggml__merges": ["h zz"]}, "its tokenizer cannot be read"),
        ({"tokenizer__ggml__merges": None}, "neither merges nor a score"),
        ({"tokenizer__ggml__model": "bert"}, "of the kind 'bert' is not read"),
        ({"tokenizer__ggml__tokens": [f"{n}" for n in range(400)]}, "has 400 tokens, its embedding only 300 rows"),
    ],
)
def test_tokenizers_that_cannot_be_used_are_one_line(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    merges: dict[str, Any] = {}
    if keys.get("tokenizer__ggml__tokens"):
        merges = {"tokenizer__ggml__merges": ["1 0"], "tokenizer__ggml__token_type": [1] * 400}
    file = tiny_gguf(tmp_path / "a.gguf", tiny_model(tmp_path / "model", "llama"), **keys, **merges)
    with pytest.raises(ForerunError, match=message) as caught:
        gguf_tokenizer(file)
    assert "\n" not in str(caught.value)


def test_the_face_of_transformers() -> None:
    other = tiny_tokenizer()
    ours = Tokenizer(other.backend_tokenizer, other.special_tokens_map, other.chat_template)
    check_answers(ours, other)
    assert ours.get_chat_template() == other.get_chat_template()


@pytest.mark.parametrize("template", [BARE, MISTRAL, PARTS, QWEN])
def test_chats_come_out_alike(template: str) -> None:
    other = tokenizer_with(template)
    ours = Tokenizer(other.backend_tokenizer, other.special_tokens_map, other.chat_template)
    messages = [{"role": "user", "content": "hello <|im_end|>"}]
    for tools in (None, [WEATHER]):
        assert encode_chat(ours, messages, tools=tools) == encode_chat(other, messages, tools=tools)


def test_several_templates() -> None:
    other = tiny_tokenizer()
    for templates in ({"default": "a", "tool_use": "b"}, {"default": "a"}):
        other.chat_template = templates
        ours = Tokenizer(other.backend_tokenizer, {}, templates)
        for tools in (None, [{}]):
            assert ours.get_chat_template(None, tools) == other.get_chat_template(None, tools)
    with pytest.raises(ValueError, match="default"):
        Tokenizer(other.backend_tokenizer, {}, {"other": "c"}).get_chat_template(None, None)


def test_a_file_answers_without_transformers(tmp_path: Path) -> None:
    """It takes longer to import than a small model to load."""
    file = tiny_gguf(tmp_path / "a.gguf", tiny_model(tmp_path / "model", "llama", intermediate_size=128), kind="Q8_0")
    program = (
        "import sys, forerun\n"
        "model = forerun.load(sys.argv[1])\n"
        "assert forerun.generate(model, 'hello', max_tokens=2).tokens\n"
        "assert not {'transformers', 'gguf'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
