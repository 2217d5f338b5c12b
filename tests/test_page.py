"""The page in a real browser, against a scripted server: asking, streaming, stopping, branching, errors, keys."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("selenium")
pytest.importorskip("fastapi")

from browser import Page, opened
from page_server import FakeServer, Script, running
from selenium import webdriver
from selenium.webdriver.common.keys import Keys


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running(FakeServer()) as fake:
        yield fake


@pytest.fixture
def page(browser: webdriver.Chrome, server: FakeServer) -> Iterator[Page]:
    with opened(browser, server) as found:
        yield found


def test_an_empty_page_shows_the_model_and_examples(page: Page) -> None:
    assert page.text(".model-name") == "SmolLM2-1.7B-Instruct"
    assert page.text(".model-facts") == "8,192 tokens of context · drafts by mtp, lookup"
    assert len(page.all(".example")) == 4
    page.click(".example")
    assert "You said:" in page.answer()
    assert "class Stack" in page.server.bodies[0]["messages"][0]["content"]
    assert page.text(".bubble pre").startswith("class Stack:\n")  # code in a question is shown as code


def test_an_answer_streams_and_ends_with_its_figures(page: Page) -> None:
    page.server.scripts["count"] = Script([("mtp", ["One", " two", " three"]), ("model", [" four."])], hold_after=1)
    page.send("count for me")
    page.wait(lambda: page.text(".answer-body") == "One two three")
    assert page.one(".send").get_attribute("aria-label") == "Stop"
    assert "3 tokens" in page.text(".figures")
    page.server.release.set()
    assert page.answer() == "One two three four."
    figures = page.texts(".figures > span")
    assert "tokens/s" in figures[0]
    assert figures[1:] == ["2.00 tokens per round", "1.3 s saved", "4 tokens", "48 prompt tokens", "exact", "prove"]
    assert page.server.bodies == [
        {
            "model": "SmolLM2-1.7B-Instruct",
            "messages": [{"role": "user", "content": "count for me"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_details": True,
        }
    ]


def test_the_end_of_an_answer_is_followed_to_its_figures(page: Page) -> None:
    """On a phone they take several lines, which only come when the answer is over."""
    page.screen(360, 560)
    left = "const log = document.querySelector('.log'); return log.scrollHeight - log.scrollTop - log.clientHeight"
    lines = [("mtp", [f"Line {n}", " of many.", "\n\n"]) for n in range(30)]
    page.server.scripts["lines"] = Script([*lines, ("model", ["The end."])], hold_after=30)
    page.send("lines")
    page.wait(lambda: "Line 29" in page.text(".answer-body"))
    page.server.release.set()
    page.answer()
    assert page.js(left) < 2
    page.server.release.clear()
    page.send("lines")  # who reads further up stays there
    page.wait(lambda: len(page.all(".answer-body")) == 2 and "Line 29" in page.texts(".answer-body")[1])
    late = "log.addEventListener('scroll', (event) => event.stopImmediatePropagation(), { capture: true })"
    page.js(f"const log = document.querySelector('.log'); {late}; log.scrollTop -= 400")  # its event may come too late
    page.wait(lambda: page.js(left) > 300)
    page.server.release.set()
    page.answer()
    assert page.js(left) > 300


def test_what_an_answer_waits_for_is_shown(page: Page) -> None:
    page.server.scripts["wait"] = Script([("model", ["At last."])], hold_first=True)
    page.server.stats["waiting"] = 2
    page.send("wait")
    page.wait(lambda: page.text(".state") == "Waiting · 1 more in the queue")
    page.server.stats["waiting"] = 0
    page.wait(lambda: page.text(".state").startswith("Reading the prompt"))
    page.server.release.set()
    assert page.answer() == "At last."
    assert page.all(".state:not([hidden])") == []


def test_escape_stops_the_work_on_the_server(page: Page) -> None:
    page.server.scripts["long"] = Script([("model", ["Once"]), ("model", [" upon"])], hold_after=1)
    page.send("a long story")
    page.wait(lambda: page.text(".answer-body") == "Once")
    page.keys(Keys.ESCAPE)
    assert page.answer() == "Once"
    assert page.text(".notice") == "Stopped."
    page.wait(lambda: page.server.cancelled == 1)
    page.ask("go on")
    assert [message["content"] for message in page.server.bodies[-1]["messages"]] == ["a long story", "Once", "go on"]


def test_the_button_stops_too(page: Page) -> None:
    page.server.scripts["long"] = Script([("model", ["Once"]), ("model", [" upon"])], hold_after=1)
    page.send("a long story")
    page.wait(lambda: page.text(".answer-body") == "Once")
    page.click(".send.stop")
    page.wait(lambda: page.server.cancelled == 1)


def test_another_answer_is_another_branch(page: Page) -> None:
    page.server.scripts["dice"] = Script([("model", ["Four."])])
    assert page.ask("roll the dice") == "Four."
    page.server.scripts["dice"] = Script([("model", ["Six."])])
    page.click("[aria-label='Answer again']")
    page.wait(lambda: page.text(".answer-body") == "Six.")
    assert page.server.bodies[0] == page.server.bodies[1]
    assert page.text(".assistant .branches") == "2 / 2"
    page.click("[aria-label='Previous version']")
    page.wait(lambda: page.text(".answer-body") == "Four.")
    assert len(page.all(".message")) == 2


def test_a_question_is_shown_as_it_was_typed(page: Page) -> None:
    page.ask("2 * 3 * 4 is **not** # a <b>heading</b>")
    assert page.one(".bubble").text == "2 * 3 * 4 is **not** # a <b>heading</b>"


def test_an_edited_question_leaves_the_old_one_as_a_branch(page: Page) -> None:
    page.ask("first")
    page.ask("second")
    page.keys(Keys.ARROW_UP)
    editor = page.one(".editor textarea")
    assert editor.get_attribute("value") == "second"
    editor.send_keys(" try", Keys.ENTER)
    page.wait(lambda: page.texts(".bubble") == ["first", "second try"])
    page.answer()
    contents = [message["content"] for message in page.server.bodies[-1]["messages"]]
    assert contents == ["first", "You said: first", "second try"]
    assert page.texts(".user .branches") == ["2 / 2"]
    page.click(".user [aria-label='Previous version']")
    page.wait(lambda: page.texts(".bubble") == ["first", "second"])
    assert page.texts(".answer-body") == ["You said: first", "You said: second"]


def test_a_reload_keeps_everything(page: Page) -> None:
    page.server.scripts["held"] = Script([("model", ["Half"]), ("model", [" an answer"])], hold_after=1)
    page.ask("remember me")
    page.send("held back")
    page.wait(lambda: page.texts(".answer-body")[-1] == "Half")
    page.load()
    page.wait(lambda: page.texts(".bubble") == ["remember me", "held back"])
    assert page.texts(".answer-body") == ["You said: remember me", "Half"]
    assert "closed before" in page.text(".notice")
    assert page.texts(".chat-open") == ["remember me"]


def test_conversations_are_found_renamed_deleted_and_brought_back(page: Page) -> None:
    page.ask("about apples")
    page.keys(Keys.CONTROL, "k")
    page.wait(lambda: page.all(".welcome"))
    page.ask("about pears")
    assert page.texts(".chat-open") == ["about pears", "about apples"]
    page.one(".search input").send_keys("said: about apples")
    assert page.texts(".chat-open") == ["about apples"]
    page.one(".search input").send_keys(Keys.CONTROL, "a", Keys.DELETE)
    page.js("document.querySelector('[aria-label=\"Rename about pears\"]').click()")
    page.keys("Fruit", Keys.ENTER)
    page.wait(lambda: page.texts(".chat-open") == ["Fruit", "about apples"])
    page.js("document.querySelector('[aria-label=\"Delete Fruit\"]').click()")
    page.wait(lambda: page.texts(".chat-open") == ["about apples"])
    assert page.all(".welcome")
    page.click(".toast button")
    page.wait(lambda: sorted(page.texts(".chat-open")) == ["Fruit", "about apples"])
    page.load()
    page.wait(lambda: sorted(page.texts(".chat-open")) == ["Fruit", "about apples"])


def test_an_answer_goes_on_while_another_conversation_is_open(page: Page) -> None:
    page.server.scripts["held"] = Script([("model", ["Slow"]), ("model", [" but sure."])], hold_after=1)
    page.send("held back")
    page.wait(lambda: page.text(".answer-body") == "Slow")
    page.click(".new-chat")
    assert page.ask("meanwhile") == "You said: meanwhile"
    page.server.release.set()
    page.wait(lambda: not page.all(".chat-row.running"))
    page.js("[...document.querySelectorAll('.chat-open')].find((e) => e.textContent === 'held back').click()")
    assert page.answer() == "Slow but sure."


def test_a_refused_request_says_why_where_it_happened(page: Page) -> None:
    page.expected = "400"
    error = {"message": "The prompt is too long.", "param": "messages"}
    page.server.scripts["long"] = Script(status=400, error=error)
    page.send("too long")
    page.answer()
    assert page.text(".problem p") == "The prompt is too long. (messages)"
    assert page.ask("shorter") == "You said: shorter"
    assert len(page.server.bodies[-1]["messages"]) == 1  # the question that got no answer is left out
    page.click(".user .edit-question")
    page.keys(Keys.CONTROL, Keys.END)
    page.keys(" still", Keys.ENTER)
    page.wait(lambda: "still" in page.text(".bubble"))
    page.answer()
    del page.server.scripts["long"]
    page.click(".problem button")
    page.wait(lambda: page.text(".answer-body") == "You said: too long still")
    assert page.all(".problem, .assistant .branches") == []


def test_a_full_server_says_when_to_come_back(page: Page) -> None:
    page.expected = "429"
    page.server.scripts["busy"] = Script(
        status=429, error={"message": "The queue is full."}, headers={"Retry-After": "7"}
    )
    page.send("busy?")
    page.answer()
    assert page.text(".problem p") == "The queue is full. Try again in 7 s."


def test_an_answer_that_breaks_off_keeps_what_it_said(page: Page) -> None:
    page.server.scripts["break"] = Script([("model", ["So far"])], error={"message": "The engine failed."})
    page.send("break")
    assert page.answer() == "So far"
    assert page.text(".problem p") == "The engine failed."
    page.server.scripts["break"] = Script([("model", ["All of it."])])
    page.click(".problem button")
    page.wait(lambda: page.text(".answer-body") == "All of it.")
    assert page.text(".branches") == "2 / 2"  # what was said is kept beside it


def test_a_server_with_a_key_asks_for_it(browser: webdriver.Chrome, server: FakeServer) -> None:
    server.key = "sesame"
    with opened(browser, server) as page:
        page.expected = "401"
        page.wait(lambda: page.all("dialog[open] #api-key"))
        page.keys("wrong", Keys.ENTER)
        page.wait(lambda: "did not accept" in page.text("#api-key-note"))
        page.keys("sesame", Keys.ENTER)
        page.wait(lambda: page.text(".model-name") == "SmolLM2-1.7B-Instruct")
        assert page.ask("open") == "You said: open"
        assert page.js("return sessionStorage['forerun.key']") == "sesame"
        assert "sesame" not in page.js("return JSON.stringify(localStorage)")
        server.key = "changed"  # in the middle of a conversation: the question is sent again by itself
        page.send("still open?")
        page.wait(lambda: page.all("dialog[open] #api-key"))
        page.keys("changed", Keys.ENTER)
        page.wait(lambda: page.texts(".answer-body")[-1] == "You said: still open?")


def test_keys_work_everywhere(page: Page) -> None:
    page.js("document.activeElement.blur()")
    page.one("body").send_keys("/")
    assert page.js("return document.activeElement.id") == "prompt"
    page.keys("one", Keys.SHIFT, Keys.ENTER)
    page.keys("two", Keys.ENTER)
    page.answer()
    assert page.server.bodies[-1]["messages"][-1]["content"] == "one\ntwo"
    page.keys(Keys.CONTROL, "k")
    page.wait(lambda: page.all(".welcome"))
    assert page.js("return document.activeElement.id") == "prompt"
