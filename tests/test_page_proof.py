"""The page proves an answer on demand: it asks for it again, with the same seed and settings, and says what came."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("selenium")
pytest.importorskip("fastapi")

from browser import Page, opened
from page_server import FakeServer, Script, running
from selenium import webdriver

REPORT = "token 3 of choice 0 is 5 ' four', plainly 6 ' five' (forerun 0.1.0, m, seed 7)"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running(FakeServer()) as fake:
        fake.scripts["count"] = Script([("mtp", ["One", " two", " three"]), ("model", [" four."])])
        yield fake


@pytest.fixture
def page(browser: webdriver.Chrome, server: FakeServer) -> Iterator[Page]:
    with opened(browser, server) as found:
        yield found


def prove(page: Page) -> None:
    page.wait(lambda: page.all(".prove:not(:disabled)"))
    page.click(".prove")


def test_an_answer_is_asked_for_again_with_its_seed_and_settings(page: Page) -> None:
    page.js("localStorage.setItem('forerun.request', JSON.stringify({ temperature: 0.5, system: 'Be brief.' }))")
    page.load()
    assert page.ask("count for me") == "One two three four."
    page.js("localStorage.clear()")
    assert page.texts(".figures > span")[-2:] == ["exact", "prove"]
    prove(page)
    page.wait(lambda: page.all(".proved"))
    assert page.texts(".figures > span")[-2:] == ["exact", "proved"] and not page.all(".prove")
    asked, again = page.server.bodies
    assert again == asked | {"seed": 7, "speculative": {"draft": "auto", "prove": True}}
    assert again["temperature"] == 0.5 and again["messages"][0]["content"] == "Be brief."
    assert page.texts(".answer-body") == ["One two three four."], "it is no other answer"
    page.load()
    page.wait(lambda: page.all(".proved"))


def test_a_named_drafter_proves_its_own_answer(page: Page) -> None:
    page.js("localStorage.setItem('forerun.request', JSON.stringify({ draft: 'mtp', depth: 3, seed: 5 }))")
    page.load()
    page.ask("count for me")
    prove(page)
    page.wait(lambda: page.all(".proved"))
    assert page.server.bodies[1]["speculative"] == {"draft": "mtp", "depth": 3, "prove": True}


def test_a_difference_is_a_report_to_copy(page: Page) -> None:
    page.ask("count for me")
    page.server.scripts["count"].proof = {"identical": False, "tokens": 3, "index": 3, "report": REPORT}
    prove(page)
    page.wait(lambda: REPORT in page.text(".problem"))
    assert page.all("[aria-label='Copy this report']") and not page.all(".exact")


def test_what_cannot_be_proved_is_said(page: Page) -> None:
    page.ask("count for me")
    page.server.scripts["count"].proof = {"identical": None, "tokens": 0, "error": "The queue is full."}
    prove(page)
    page.wait(lambda: page.text(".notice") == "Not proved: The queue is full.")
    page.server.scripts["count"] = Script([("model", ["Five."])])
    prove(page)
    page.wait(lambda: "another text" in page.text(".notice"))
    page.server.scripts["count"] = Script(error={"message": "Loading model"})
    prove(page)
    page.wait(lambda: page.text(".notice") == "Not proved: Loading model")
    assert page.texts(".answer-body") == ["One two three four."]


def test_a_proof_can_be_stopped(page: Page) -> None:
    page.ask("count for me")
    page.server.scripts["count"].hold_after = 1
    prove(page)
    page.wait(lambda: page.texts(".proving") == ["proving…"] and page.all(".send.stop"))
    page.click(".send.stop")
    page.wait(lambda: page.server.cancelled == 1 and page.all(".prove:not(:disabled)"))
    assert page.texts(".answer-body") == ["One two three four."] and not page.all(".notice")


def test_an_answer_that_was_stopped_has_no_button(page: Page) -> None:
    page.server.scripts["count"].hold_after = 1
    page.send("count for me")
    page.wait(lambda: page.text(".answer-body") == "One two three")
    page.click(".send.stop")
    page.wait(lambda: page.text(".notice") == "Stopped.")
    assert not page.all(".prove")


def test_settings_show_the_values_that_hold(page: Page) -> None:
    page.click("[aria-label='Settings']")
    fields = {name: page.one(f"#settings [name={name}]") for name in ("temperature", "topK")}
    shown = {name: field.get_attribute("placeholder") for name, field in fields.items()}
    assert shown == {"temperature": "0.7", "topK": "40"}
