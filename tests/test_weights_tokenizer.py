"""The tokenizer: loaded without code from the folder, with every token that ends an answer."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
from tiny import tiny_model

from forerun.errors import ForerunError
from forerun.weights.tokenizer import load_tokenizer, stop_token_ids


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("original"), "qwen2")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_text_and_chat_template(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    text = "the thing 漢字 😀 <|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n"


def test_every_source_of_end_tokens_counts(folder: Path) -> None:
    change(folder / "config.json", eos_token_id=11)
    change(folder / "generation_config.json", eos_token_id=[12, 13])
    change(folder / "tokenizer_config.json", eos_token="<unk>")
    tokenizer = load_tokenizer(folder)
    unknown, turn_end = 3, 2
    assert stop_token_ids(folder, tokenizer) == {11, 12, 13, unknown, turn_end}
    tokenizer.chat_template = "{{ messages }}"  # names no end of turn
    assert stop_token_ids(folder, tokenizer) == {11, 12, 13, unknown}
    (folder / "generation_config.json").unlink()
    change(folder / "config.json", eos_token_id=None, text_config={"eos_token_id": 14})
    assert stop_token_ids(folder, tokenizer) == {14, unknown}


@pytest.mark.parametrize("value", ["two", [1, None], -1, True, 1.5, ["x" * 5000]])
def test_senseless_end_tokens_are_refused(folder: Path, value: object) -> None:
    change(folder / "config.json", eos_token_id=value)
    with pytest.raises(ForerunError, match="eos_token_id") as caught:
        stop_token_ids(folder, load_tokenizer(folder))
    assert len(str(caught.value)) < 600


def test_a_length_that_is_none_does_not_matter(folder: Path) -> None:
    change(folder / "tokenizer_config.json", model_max_length="long")
    assert load_tokenizer(folder)("hi")["input_ids"]


def test_code_for_the_tokenizer_is_refused(folder: Path) -> None:
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", None]})
    with pytest.raises(ForerunError, match="auto_map"):
        load_tokenizer(folder)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_is_one_line(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ForerunError, match="tokenizer") as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("template", [5, True, {"default": 7}, [{"name": "default", "template": 3}]])
def test_a_template_that_is_no_text_is_one_line(folder: Path, template: object) -> None:
    (folder / "chat_template.jinja").unlink()
    change(folder / "tokenizer_config.json", chat_template=template)
    with pytest.raises(ForerunError, match="chat_template of its tokenizer must be text, found "):
        load_tokenizer(folder)


def test_a_missing_tokenizer_says_what_to_do(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ForerunError, match=r"tokenizer\.json"):
        load_tokenizer(folder)


def test_a_template_linked_from_outside_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(ForerunError, match="leaves the model folder"):
        load_tokenizer(folder)


def test_templates_run_in_the_sandbox(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(Exception, match="unsafe"):
        load_tokenizer(folder).apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)


def test_no_alarm_about_a_tokenizer_that_is_right(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers takes any large one whose config does not tell its version for an old Mistral's."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    large = Tokenizer(WordLevel({str(n): n for n in range(100_002)}, unk_token="0"))
    large.pre_tokenizer = Whitespace()
    large.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "config.json").read_text())
    settings.pop("transformers_version", None)
    logging.getLogger("transformers").addHandler(caplog.handler)
    for family, alarm in (("qwen2", False), ("gemma3_text", False), ("mistral", True)):
        (folder / "config.json").write_text(json.dumps(settings | {"model_type": family}))
        caplog.clear()
        load_tokenizer(folder)
        assert ("incorrect tokenization" in caplog.text) == alarm, family
    logging.getLogger("transformers").removeHandler(caplog.handler)
