"""Answers about media through the library, with a reader that makes rows of a file's bytes: drafted equals plain."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from engines import decoder
from fake_media import FakeReader, seeing_tokenizer
from local_engines import language_model
from tiny import tiny_model

import forerun
from forerun.cli.chat_talkers import LocalTalker
from forerun.errors import ForerunError
from forerun.language_model import LanguageModel
from forerun.options import GenerationOptions
from forerun.progress import NullProgress


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    made = language_model(decoder(tiny_model(tmp_path_factory.mktemp("m"), "llama"), False))
    made.tokenizer = seeing_tokenizer()
    made.media, made.name = FakeReader(made.tokenizer), "tiny"
    return made


def answer(model: LanguageModel, prompt: Any = "What is this?", **options: Any) -> forerun.response.Response:
    return forerun.generate(model, prompt, **{"max_tokens": 24, "draft": "off", **options})


def test_answers_depend_on_the_picture_and_on_nothing_else(model: LanguageModel) -> None:
    cat, dog = answer(model, images=[b"a cat"]), answer(model, images=[b"a dog"])
    assert cat.tokens != dog.tokens
    assert answer(model, images=[b"a cat"]).tokens == cat.tokens
    assert answer(model).tokens not in (cat.tokens, dog.tokens)
    for depth in (1, 4):
        drafted = answer(model, images=[b"a cat"], draft="lookup", draft_tokens=depth)
        assert drafted.tokens == cat.tokens and drafted.text == cat.text
    warm = {"temperature": 0.9, "seed": 7}
    plain = answer(model, images=[b"a cat"], **warm)
    assert plain.tokens != cat.tokens
    assert answer(model, images=[b"a cat"], draft="lookup", draft_tokens=3, **warm).tokens == plain.tokens


def test_files_bytes_messages_and_raw_prompts_are_the_same_prompt(model: LanguageModel, tmp_path: Path) -> None:
    file = tmp_path / "cat.png"
    file.write_bytes(b"a cat")
    wanted = answer(model, images=[b"a cat"], audio=[b"meow"])
    text = {"type": "text", "text": "What is this?"}
    parts = [{"type": "image", "path": file}, {"type": "audio", "audio": b"meow"}, text]
    raw = "<|im_start|>user\n<|image|><|audio|>What is this?<|im_end|>\n<|im_start|>assistant\n"
    for prompt, options in (
        ([{"role": "user", "content": parts}], {}),
        ([{"role": "user", "content": parts[1:]}], {"images": str(file)}),
        (raw, {"raw": True, "images": [file], "audio": [b"meow"]}),
        (model.tokenizer(raw)["input_ids"], {"images": [file], "audio": [b"meow"]}),
    ):
        assert answer(model, prompt, **options).tokens == wanted.tokens
    assert wanted.prompt_tokens > len(model.tokenizer(raw)["input_ids"]) + 2, "every row of a picture counts"


def test_conversations_go_on_after_a_picture(model: LanguageModel) -> None:
    first = {"role": "user", "content": [{"type": "image", "image": b"a cat"}, {"type": "text", "text": "What?"}]}
    turns = [first, {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "Sure?"}]
    plain = answer(model, turns, system="Be brief.")
    assert answer(model, turns, system="Be brief.", draft="auto").tokens == plain.tokens
    other = {**first, "content": [{"type": "image", "image": b"a dog"}, {"type": "text", "text": "What?"}]}
    assert answer(model, [other, *turns[1:]], system="Be brief.").tokens != plain.tokens


def test_a_chat_in_the_terminal_shows_the_same(model: LanguageModel, tmp_path: Path) -> None:
    file = tmp_path / "cat.png"
    file.write_bytes(b"a cat")
    talker = LocalTalker(model, "tiny", NullProgress())
    content = [{"type": "image", "path": str(file)}, {"type": "text", "text": "What is this?"}]
    options = GenerationOptions(max_tokens=24, draft="off")
    with closing(talker.answer([{"role": "user", "content": content}], options)) as reply:
        text = "".join(piece.text for piece in reply)
    assert text == answer(model, images=[b"a cat"]).text
    talker.check_media("audio")
    blind = LocalTalker(dataclasses.replace(model, media=None), "tiny", NullProgress())
    with pytest.raises(ForerunError, match="tiny reads text only; it cannot take images"):
        blind.check_media("image")


def test_a_picture_may_be_all_that_is_said(model: LanguageModel) -> None:
    assert answer(model, "", images=[b"a cat"]).tokens
    with pytest.raises(ForerunError, match="empty"):
        answer(model, "")


def test_what_does_not_fit_is_one_line_and_leaves_nothing_behind(model: LanguageModel) -> None:
    for prompt, options, said in (
        ("What?", {"images": [b"not a picture"]}, "image 1 is not an image"),
        ("no place", {"images": [b"a"], "raw": True}, "image 1 has no placeholder"),
        ("<|image|><|image|>", {"images": [b"a"], "raw": True}, "more placeholders than media"),
        ("What?", {"images": ["nowhere.png"]}, "cannot read the image nowhere.png"),
        ("a <|image|> and <|audio|>", {"raw": True}, "has 2 placeholders for media and no files came with it"),
        ([5, 290, 6], {}, "has 1 placeholder for media and no files came with it"),
        ([{"role": "system", "content": "x"}], {"images": [b"a"]}, "there is none"),
    ):
        with pytest.raises(ForerunError, match=said) as failure:
            answer(model, prompt, **options)
        assert "\n" not in str(failure.value)
    assert not model.engine.scheduler.active and not model.engine.scheduler.waiting


def test_a_model_that_reads_text_only_says_so(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "media", None)
    with pytest.raises(ForerunError, match=r"^tiny reads text only; it cannot take images$"):
        answer(model, images=[b"a"])


def test_what_a_user_types_is_no_picture(model: LanguageModel) -> None:
    reader = model.media
    assert isinstance(reader, FakeReader)
    before = len(reader.read_parts)
    assert answer(model, "<|image|> What?").prompt_tokens > len("<|image|>")
    assert len(reader.read_parts) == before
    shown = answer(model, "<|image|> What?", images=[b"a cat"])
    assert shown.tokens and len(reader.read_parts) == before + 1
