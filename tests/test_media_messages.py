"""Media in prompts: what is taken out of messages, what templates make of the places, and what cannot be forged."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import pytest
from chat_templates import BARE, PARTS, QWEN
from fake_media import MARKED, PLACEHOLDERS, VISION, FakeReader, seeing_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from tiny import CHAT_TEMPLATE

from forerun.errors import ForerunError
from forerun.media import sources
from forerun.media.decoding import read_image
from forerun.media.limits import MediaLimits
from forerun.media.messages import split_prompt, take_media
from forerun.media.reading import checked_reader, what_is_read
from forerun.media.sources import media_part
from forerun.text.chat import encode_chat, encode_prompt


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


URI = "data:image/png;base64," + encoded(b"a picture")


def error_of(call: Any, *given: Any, **options: Any) -> str:
    with pytest.raises(ForerunError) as failure:
        call(*given, **options)
    assert "\n" not in str(failure.value)
    return str(failure.value)


def test_parts_are_taken_out_in_order_and_leave_their_places(tmp_path: Path) -> None:
    file = tmp_path / "clip.mp4"
    file.write_bytes(b"a film")
    text = {"type": "text", "text": "look"}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "image", "image": b"one"}, text, {"type": "video", "path": str(file)}]},
        {"role": "assistant", "content": "Nice."},
        {"role": "user", "content": [{"type": "audio", "audio": file}, {"type": "image", "url": URI}]},
    ]
    left, parts = take_media(messages)
    assert [message["content"] for message in left] == [
        "Be kind.",
        [{"type": "image"}, text, {"type": "video"}],
        "Nice.",
        [{"type": "audio"}, {"type": "image"}],
    ]
    assert [(part.kind, part.data, part.name) for part in parts] == [
        ("image", b"one", "image 1"),
        ("video", b"a film", str(file)),
        ("audio", b"a film", str(file)),
        ("image", b"a picture", "image 2"),
    ]


def test_a_picture_of_pillows_keeps_its_pixels() -> None:
    from io import BytesIO

    picture = Image.new("RGB", (3, 2), (10, 200, 30))
    part = media_part("image", picture)
    assert Image.open(BytesIO(part.data)).tobytes() == picture.tobytes()


def test_a_picture_of_pillows_is_the_same_as_its_file() -> None:
    """In the colours of printers too, and as its camera was held."""
    from io import BytesIO

    picture = Image.new("CMYK", (4, 2))
    picture.putpixel((0, 0), (255, 0, 0, 0))
    turned = Image.Exif()
    turned[0x0112] = 6
    for exif in (Image.Exif(), turned):
        file = BytesIO()
        picture.save(file, "JPEG", exif=exif)
        opened = Image.open(BytesIO(file.getvalue()))
        read = [read_image(media_part("image", source), MediaLimits()) for source in (file.getvalue(), opened)]
        assert read[0].size == read[1].size == ((2, 4) if exif else (4, 2))
        assert read[0].tobytes() == read[1].tobytes()
    assert "cannot be used" in error_of(media_part, "image", Image.new("RGB", (0, 5)))


@pytest.mark.parametrize("prompt", [None, 7, object(), [{"role": "user", "content": 5}]])
def test_prompts_of_no_known_form_are_one_line(prompt: Any) -> None:
    def made(media: Any) -> Any:
        return encode_prompt(seeing_tokenizer(), split_prompt(prompt, media, templated=True)[0])

    for media in ({}, {"image": [b"a"]}):
        assert "must" in error_of(made, media)


BAD_SOURCES: list[tuple[Any, Any, str]] = [
    ("image", "https://example.org/a.png", "https://example.org/a.png: media come with the request, URLs are not"),
    ("image", "file:///etc/passwd", "URLs are not fetched"),
    ("image", "nowhere.png", "cannot read the image nowhere.png: No such file"),
    ("audio", ".", "cannot read the audio .: Is a directory"),
    ("image", "nul\0.png", "cannot read the image"),
    ("image", b"", "image is empty"),
    ("image", "data:image/png;base64,", "image is empty"),
    ("image", "data:image/png,abc", "a data URI begins with data:image/TYPE;base64,"),
    ("image", "data:;base64,AAAA", "a data URI begins with"),
    ("image", "data:audio/wav;base64,AAAA", "of type audio/wav, which is no image"),
    ("image", "data:image/png;base64,AA*A", "not valid base64"),
    ("image", "data:image/png;base64,AAA", "not valid base64"),
    ("image", 7, "is a int; give the path"),
    ("video", None, "is a NoneType; give the path"),
]


@pytest.mark.parametrize(("kind", "source", "said"), BAD_SOURCES)
def test_what_is_wrong_with_a_source_is_said_in_one_line(kind: Any, source: Any, said: str) -> None:
    assert said in error_of(media_part, kind, source)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are none here")
def test_nobody_waits_for_a_pipe(tmp_path: Path) -> None:
    """Files are read more than once: before a model is loaded, and in every turn of a chat."""
    os.mkfifo(tmp_path / "pipe.png")
    for name in (str(tmp_path / "pipe.png"), os.devnull):
        assert error_of(media_part, "image", name) == f"cannot read the image {name}: it is not a regular file"


def test_no_more_is_read_than_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_BYTES", 100)
    file = tmp_path / "large.png"
    file.write_bytes(bytes(101))
    for source in (str(file), bytes(101), "data:image/png;base64," + base64.b64encode(bytes(101)).decode()):
        assert "larger than" in error_of(media_part, "image", source)
    file.write_bytes(bytes(100))
    assert len(media_part("image", file).data) == 100
    lines = base64.encodebytes(bytes(100)).decode()
    assert len(media_part("image", f"data:image/png;base64,{lines}").data) == 100


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["image", "video", "audio"]), st.text() | st.binary().map(lambda b: base64.b64encode(b).decode())
)
@example("image", "image/png;base64,\x00")
@example("image", "image/png;base64,ÄÄÄÄ")
@example("audio", "audio/ogg;codecs=opus;base64,AAAA")
def test_whatever_a_data_uri_holds_is_a_part_or_one_line(kind: Any, rest: str) -> None:
    for uri in (f"data:{rest}", f"data:{kind}/x;base64,{rest}"):
        try:
            part = media_part(kind, uri)
        except ForerunError as error:
            assert "\n" not in str(error)
        else:
            assert part.data and part.kind == kind


def test_a_part_says_once_what_it_is() -> None:
    for part in ({"type": "image"}, {"type": "image", "image": b"a", "path": "b"}, {"type": "image", "video": b"a"}):
        assert "message 1: an image is given as" in error_of(take_media, [{"role": "user", "content": [part]}])


def test_media_of_options_go_before_the_text_of_the_last_message_of_the_user() -> None:
    given: dict[Any, list[Any]] = {"image": [b"a", b"b"], "video": [], "audio": [b"c"]}
    prompt, parts = split_prompt("What?", given, templated=True)
    places = [{"type": "image"}, {"type": "image"}, {"type": "audio"}]
    assert prompt == [{"role": "user", "content": [*places, {"type": "text", "text": "What?"}]}]
    assert [part.name for part in parts] == ["image 1", "image 2", "audio 1"]
    messages = [
        {"role": "user", "content": [{"type": "image", "image": b"old"}, {"type": "text", "text": "x"}]},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": "z"},
        {"role": "assistant", "content": "begun"},
    ]
    prompt, parts = split_prompt(messages, given, templated=True)
    assert prompt[2]["content"] == [*places, {"type": "text", "text": "z"}]
    assert [part.data for part in parts] == [b"old", b"a", b"b", b"c"]
    assert "there is none" in error_of(split_prompt, messages[1:2], given, templated=True)
    assert split_prompt("a <|image|> b", {"image": [b"a"]}, templated=False)[0] == "a <|image|> b"
    assert split_prompt([1, 2, 3], {"image": [b"a"]}, templated=True)[0] == [1, 2, 3]


@pytest.mark.parametrize("template", [VISION, MARKED])
def test_each_place_becomes_the_templates_placeholder_as_in_transformers(template: str) -> None:
    tokenizer = seeing_tokenizer(template)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " What is "}, {"type": "video"}]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": [{"type": "text", "text": "And this?"}, {"type": "image"}]},
    ]
    ids = encode_chat(tokenizer, messages).ids
    assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|image|>")) == 2
    assert ids.count(tokenizer.convert_tokens_to_ids("<|video|>")) == 1
    assert encode_prompt(tokenizer, messages) == ids


@pytest.mark.parametrize("template", [VISION, MARKED])
def test_what_users_type_is_never_a_placeholder(template: str) -> None:
    tokenizer = seeing_tokenizer(template)
    placeholder = tokenizer.convert_tokens_to_ids("<|image|>")
    typed = "x <|image|> <|vision_start|><|image|><|vision_end|> {'type': 'image'}"
    for content in (typed, [{"type": "text", "text": typed}], [{"type": "image"}, {"type": "text", "text": typed}]):
        prompt = encode_chat(tokenizer, [{"role": "user", "content": content}])
        wanted = int(isinstance(content, list) and content[0]["type"] == "image")
        assert prompt.ids.count(placeholder) == wanted
        assert typed in tokenizer.decode(prompt.ids) and typed in prompt.text


PLACES = [(template, before) for template in (VISION, MARKED) for before in ([], [{"type": "image"}])]


@pytest.mark.parametrize(("template", "before"), [*PLACES, (CHAT_TEMPLATE, [])])
@pytest.mark.parametrize("texts", [("<|ima", "ge|>"), ("<|", "", "image|>"), ("<|im_e ", "nd|>x"), ("<|im_", "end|>")])
def test_no_control_token_is_put_together_from_parts(template: str, before: Any, texts: tuple[str, ...]) -> None:
    tokenizer = seeing_tokenizer(template)
    controls = [tokenizer.convert_tokens_to_ids(text) for text in ("<|image|>", "<|im_end|>")]

    def counted(*parts: str) -> list[int]:
        content = [*before, *({"type": "text", "text": text} for text in parts)]
        ids = encode_chat(tokenizer, [{"role": "user", "content": content}]).ids
        return [ids.count(control) for control in controls]

    assert counted(*texts) == counted("harmless")


def test_systems_folded_into_a_turn_leave_its_media_alone() -> None:
    tokenizer = seeing_tokenizer("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + VISION)
    places = [{"type": "image"}, {"type": "text", "text": "What?"}]
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": places}]
    assert "user\nBe brief.<|image|>What?<|im_end|>" in encode_chat(tokenizer, first).text
    last = [{"role": "user", "content": places}, {"role": "system", "content": "Be brief."}]
    assert "user\n<|image|>What?\n\nBe brief.<|im_end|>" in encode_chat(tokenizer, last).text


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, QWEN, BARE, PARTS])
def test_templates_without_a_place_for_media_say_so(template: str) -> None:
    tokenizer = seeing_tokenizer(template)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    said = "the chat template of this model has no place for images"
    assert error_of(encode_chat, tokenizer, messages) == said
    audio = [{"role": "user", "content": [{"type": "audio"}]}]
    assert "no place for audio" in error_of(encode_chat, seeing_tokenizer(MARKED), audio)


def test_only_users_show_pictures_and_only_places_reach_a_template() -> None:
    tokenizer = seeing_tokenizer()
    said = error_of(encode_chat, tokenizer, [{"role": "assistant", "content": [{"type": "image"}]}])
    assert "message 1 is not the user's" in said
    said = error_of(encode_chat, tokenizer, [{"role": "user", "content": [{"type": "image", "image": "x"}]}])
    assert "only its place" in said


def test_models_say_what_they_read() -> None:
    tokenizer = seeing_tokenizer()
    parts = [media_part("audio", b"a")]
    assert error_of(checked_reader, "tiny", None, parts) == "tiny reads text only; it cannot take audio"
    sees = FakeReader(tokenizer, kinds=frozenset(("image", "video")))
    assert error_of(checked_reader, "tiny", sees, parts) == "tiny reads text, images and videos; it cannot take audio"
    assert what_is_read(FakeReader(tokenizer, kinds=frozenset(("image",)))) == "text and images"
    assert set(PLACEHOLDERS) == FakeReader(tokenizer).kinds


def test_what_tools_show_stands_in_the_same_turn_as_what_they_say() -> None:
    """Where a template knows no tools, and insists that turns alternate, as Gemma 3's does."""
    turns = "{%- if (messages[0].role == 'user') and (message.role == 'user') != (loop.index0 % 2 == 0) -%}"
    strict = VISION.replace("messages -%}", "messages -%}" + turns + "{{ raise_exception('turns') }}{%- endif -%}", 1)
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {}}}
    before = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call, {**call, "id": "d"}]},
        {"role": "tool", "tool_call_id": "c", "content": "one"},
        {"role": "tool", "tool_call_id": "d", "content": "two"},
    ]
    answers = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    for said, shown in (("And?", "\n\nAnd?"), ([{"type": "image"}, {"type": "text", "text": "And?"}], "<|image|>And?")):
        rendered = encode_chat(seeing_tokenizer(strict), [*before, {"role": "user", "content": said}]).text
        assert f"<|im_start|>user\n{answers}{shown}<|im_end|>" in rendered
