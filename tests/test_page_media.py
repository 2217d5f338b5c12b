"""Attaching files on the page: a real server with a reader that makes rows of their bytes, and a real browser."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium")
pytest.importorskip("fastapi")

from browser import Page, opened
from fake_media import FakeReader, seeing_tokenizer
from media_files import encoded, picture
from selenium import webdriver
from serve_fakes import FakeEngine, app_for, live

DROP = """
const [bytes, name, type, event] = arguments;
const data = new DataTransfer();
data.items.add(new File([Uint8Array.from(atob(bytes), (c) => c.charCodeAt(0))], name, { type }));
const options = { bubbles: true, cancelable: true };
const made = event === "paste"
  ? new ClipboardEvent("paste", { ...options, clipboardData: data })
  : new DragEvent(event, { ...options, dataTransfer: data });
document.getElementById("prompt").dispatchEvent(made);
return made.defaultPrevented;
"""


@dataclass
class Served:
    """What `Page` wants of a server."""

    engine: FakeEngine
    reader: FakeReader
    url: str = ""
    bodies: list[Any] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[Served]:
    engine = FakeEngine(say=lambda work: "I see it.", tokenizer=seeing_tokenizer())
    reader = FakeReader(engine.tokenizer, kinds=frozenset(("image", "audio")))
    with live(app_for(engine, media=reader)) as address:
        yield Served(engine, reader, f"{address}/", engine.started)


@pytest.fixture
def page(browser: webdriver.Chrome, server: Served) -> Iterator[Page]:
    with opened(browser, server) as found:  # type: ignore[arg-type]
        found.wait(lambda: found.all(".attach:not([hidden])"))
        yield found


def drop(page: Page, data: bytes, name: str, kind: str, event: str = "drop") -> bool:
    return bool(page.js(DROP, base64.b64encode(data).decode(), name, kind, event))


def test_files_are_attached_shown_sent_and_kept(page: Page, server: Served, tmp_path: Path) -> None:
    cat, dog = encoded(picture(seed=1)), encoded(picture(seed=2), "JPEG")
    (tmp_path / "cat.png").write_bytes(cat)
    page.one("input[type=file].unseen").send_keys(str(tmp_path / "cat.png"))
    page.wait(lambda: len(page.all(".composer-box .attachment img")) == 1)
    assert drop(page, dog, "dog.jpg", "image/jpeg", "paste")
    page.wait(lambda: len(page.all(".composer-box .attachment img")) == 2)
    assert drop(page, b"meow", "meow.wav", "audio/wav")
    page.wait(lambda: page.text(".composer-box .attached-file") == "meow.wav")
    page.click("[aria-label='Remove dog.jpg']")
    page.wait(lambda: len(page.all(".composer-box .attachment")) == 2)
    assert page.ask("What is this?") == "I see it."
    assert [(part.kind, part.data) for part in server.reader.read_parts[-1]] == [("image", cat), ("audio", b"meow")]
    assert page.all(".composer-box .attachment") == []
    size = "const img = document.querySelector('.message.user img'); return [img.naturalWidth, img.naturalHeight]"
    assert page.js(size) == [60, 40], "the picture is really shown"
    page.ask("And now?")
    assert len(server.reader.read_parts[-1]) == 2, "the whole conversation is sent again"
    page.load()
    page.wait(lambda: page.all(".message.user .attachment img"))
    assert page.js(size) == [60, 40]
    assert page.text(".message.user .attached-file") == "meow.wav"
    page.click(".edit-question")
    page.keys("!")
    page.click(".editor .primary")
    page.answer()
    assert [part.data for part in server.reader.read_parts[-1]] == [cat, b"meow"]


def test_a_picture_may_be_the_whole_question(page: Page, server: Served) -> None:
    assert page.one(".send").get_attribute("disabled")
    drop(page, encoded(picture()), "cat.png", "image/png")
    page.wait(lambda: page.all(".composer-box .attachment img"))
    page.click(".send")
    assert page.answer() == "I see it."
    assert page.all(".message.user .bubble") == []
    page.wait(lambda: "cat.png" in page.text("#sidebar"))


def test_what_the_model_does_not_read_is_refused_on_the_page(page: Page, server: Served) -> None:
    drop(page, b"a film", "film.mp4", "video/mp4")
    page.wait(lambda: page.text("#toasts") == "film.mp4: this model reads image, audio only.")
    drop(page, b"<svg/>", "drawing.svg", "image/svg+xml")
    page.wait(lambda: "drawing.svg is not a picture in PNG, JPEG, WebP, GIF or BMP format." in page.text("#toasts"))
    assert page.all(".composer-box .attachment") == []
    drop(page, b"not a picture", "bad.png", "image/png")
    page.expected = "400"
    page.send("What?")
    page.wait(lambda: "is not an image" in page.text(".message.assistant"))


def test_models_that_read_text_only_have_no_paper_clip(browser: webdriver.Chrome) -> None:
    engine = FakeEngine()
    with live(app_for(engine)) as address:
        text_only: Any = Served(engine, FakeReader(engine.tokenizer), f"{address}/", engine.started)
        with opened(browser, text_only) as page:
            assert page.ask("Hi") == "Hello there, world."
            assert page.all(".attach:not([hidden])") == []
            assert not drop(page, b"a", "a.png", "image/png", "paste")


def test_an_import_brings_pictures_and_nothing_else(page: Page) -> None:
    good = {"kind": "image", "name": "a.png", "url": "data:image/png;base64,AAAA"}
    bad = [
        {**good, "url": "https://example.org/a.png"},
        {**good, "url": "javascript:alert(1)"},
        {**good, "url": "data:image/svg+xml;base64,AAAA"},
        {**good, "url": "data:text/html;base64,AAAA"},
        {**good, "kind": "video"},
        {**good, "name": 7},
        7,
    ]
    found = page.module(
        "return (await load('attachments.js')).importedMedia(values[0]);", [*bad, good, {**good, "extra": 1}]
    )
    assert found == [good, good]
    assert page.module("return (await load('attachments.js')).importedMedia('x');") == []


SLOW = """
const read = FileReader.prototype.readAsDataURL;
window.held = [];
FileReader.prototype.readAsDataURL = function (file) { window.held.push(() => read.call(this, file)); };
"""


def test_a_question_waits_for_the_files_that_are_still_being_read(page: Page, server: Served) -> None:
    cat = encoded(picture())
    page.js(SLOW)
    drop(page, cat, "cat.png", "image/png")
    page.wait(lambda: page.js("return window.held.length") == 1)
    page.send("What is this?")
    assert page.one(".send").get_attribute("disabled") and not page.all(".message.user")
    page.js("window.held[0]()")
    page.wait(lambda: page.all(".composer-box .attachment img"))
    page.click(".send")
    page.answer()
    assert [part.data for part in server.reader.read_parts[-1]] == [cat]


def test_a_file_never_goes_into_another_conversation(page: Page) -> None:
    page.ask("Hi")
    page.js(SLOW)
    drop(page, encoded(picture()), "cat.png", "image/png")
    page.wait(lambda: page.js("return window.held.length") == 1)
    page.click(".new-chat")
    page.wait(lambda: not page.all(".message.user"))
    page.js("window.held[0]()")
    page.wait(lambda: "cat.png" in page.text("#toasts"))
    assert page.all(".composer-box .attachment") == []
    page.one("#prompt").send_keys("x")
    assert not page.one(".send").get_attribute("disabled")
