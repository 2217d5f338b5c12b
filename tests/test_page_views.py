"""The page's views in a real browser: colours, thinking, settings, the engine, themes, small screens, hostile text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("selenium")
pytest.importorskip("fastapi")

from browser import Page, opened
from page_server import FakeServer, Script, running
from selenium import webdriver
from selenium.webdriver import ActionChains
from selenium.webdriver.common.keys import Keys

HOSTILE = """<img src=x onerror="window.hacked = 1"><script>window.hacked = 2</script>

[a](javascript:window.hacked=3) [b](JaVaScRiPt:window.hacked=4) [c](data:text/html,<script>window.hacked=5</script>)
[d](https://example.com/" onclick="window.hacked=6) ![e](http://example.com/spy.png) <javascript:window.hacked=7>

| <b onmouseover="window.hacked = 8">x</b> |
|---|
| <iframe src="javascript:window.hacked=9"> |

```"><img src=x onerror=window.hacked=10>
</code></pre><img src=x onerror="window.hacked = 11">
```
"""


@pytest.fixture
def page(browser: webdriver.Chrome) -> Iterator[Page]:
    with running(FakeServer()) as fake, opened(browser, fake) as found:
        yield found


def test_drafts_are_coloured_and_a_token_tells_its_round(page: Page) -> None:
    page.server.scripts["draft"] = Script(
        [("model", ["**Go"]), ("mtp", [" on", " and", " on"]), ("long lookup", ["**", "!"])]
    )
    page.ask("draft")
    assert page.text(".answer-body strong") == "Go on and on"
    page.click("#show-drafts")
    assert page.text(".tokens") == "**Go on and on**!"
    sources = page.js("return [...document.querySelectorAll('.token')].map((e) => e.dataset.source)")
    assert sources == ["model", "mtp", "mtp", "model", "long-lookup", "model"]
    assert page.texts(".round.several") == [" on and on", "**!"]
    assert page.texts(".legend li") == [
        "Model 50 %",
        "MTP head 33 %",
        "Long lookup 17 %",
        "3 of 6 tokens drafted · 3 rounds",
    ]
    colours = page.js("return [...document.querySelectorAll('.token')].map((e) => getComputedStyle(e).backgroundColor)")
    assert colours[0] == colours[3] != colours[1] == colours[2] != colours[4]
    ActionChains(page.browser).move_to_element(page.all(".token")[2]).perform()
    assert page.texts(".token-card:not([hidden]) > *")[:2] == ["MTP head", "Round 1 · token 2 of 3"]
    assert page.texts(".round.held") == [" on and on"]
    page.click("#show-drafts")
    assert page.text(".answer-body strong") == "Go on and on"
    assert page.all(".token-card:not([hidden])") == []


def test_colours_come_while_it_streams(page: Page) -> None:
    page.click("#show-drafts")
    page.server.scripts["draft"] = Script([("lookup", ["a", "b"]), ("model", ["c"])], hold_after=1)
    page.send("draft")
    page.wait(lambda: page.texts(".token") == ["a", "b"])
    page.server.release.set()
    page.wait(lambda: page.texts(".token") == ["a", "b", "c"])


def test_characters_of_several_tokens_are_shown_whole(page: Page) -> None:
    bad = "\ufffd"
    rounds = [("mtp", ["Hi", " ", bad, bad]), ("lookup", [bad, "!", bad]), ("model", [bad])]
    page.server.scripts["wave"] = Script(rounds, texts=["Hi ", "👋!", "é"])
    page.click("#show-drafts")
    page.ask("wave")
    assert page.texts(".token") == ["Hi", " ", "👋", "", "", "!", "é", ""]
    assert page.texts(".round") == ["Hi 👋", "!é", ""]


def test_thinking_is_folded(page: Page) -> None:
    page.server.scripts["think"] = Script(
        [("model", ["42"])], thinking=[("mtp", ["Let", " me", " see"]), ("model", ["."])], hold_after=1
    )
    page.send("think")
    page.wait(lambda: page.text(".answer-body") == "42")
    page.server.release.set()
    assert page.answer() == "42"
    assert page.text(".thinking summary").startswith("Thought for ")
    assert page.text(".thinking summary").endswith(" s · 4 tokens")
    assert not page.one(".thinking-body").is_displayed()
    page.click(".thinking summary")
    page.wait(lambda: page.one(".thinking-body").text == "Let me see.")
    page.click("#show-drafts")
    assert page.texts(".thinking .token") == ["Let", " me", " see", "."]
    assert page.texts(".answer-body .token") == ["42"]
    page.ask("and now?")
    assert "Let me see" not in json.dumps(page.server.bodies[-1])


def test_hostile_text_stays_text(page: Page) -> None:
    page.server.scripts["hack"] = Script([("model", [HOSTILE])])
    question = "<img src=x onerror='window.hacked=12'> hack"
    page.ask(question)
    page.click("#show-drafts")
    page.click("#show-drafts")
    assert page.texts(".bubble") == page.texts(".chat-open") == [question]
    found = "return [...document.querySelectorAll('#log img, #log iframe, #log script, #log b:not(.figures b)')].length"
    assert page.js(found) == 0
    links = page.js("return [...document.querySelectorAll('.prose a')].map((e) => [e.protocol, e.rel, e.onclick])")
    assert links == [["https:", "noopener noreferrer", None], ["http:", "noopener noreferrer", None]]
    assert page.js("return window.hacked ?? null") is None


def test_code_is_copied_as_it_is(page: Page) -> None:
    page.js(
        "navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); };arguments[0]",
    )
    page.server.scripts["code"] = Script([("model", ["So:\n\n```python\nif a < b:\n    swap()  # <b>\n```\n"])])
    page.ask("code")
    assert page.texts(".code .keyword") == ["if"]
    page.click(".code .copy")
    page.wait(lambda: page.js("return window.copied") == "if a < b:\n    swap()  # <b>")
    page.click("[aria-label='Copy this answer']")
    page.wait(lambda: str(page.js("return window.copied")).startswith("So:\n\n```python"))


def test_settings_are_sent_and_kept(page: Page) -> None:
    page.click("[aria-label=Settings]")
    assert page.one("[name=temperature]").get_attribute("placeholder") == "0.7"
    assert page.one("[name=depth]").get_attribute("disabled")
    page.one("#settings textarea").send_keys("Be brief.")
    for name, value in {
        "temperature": "0.25",
        "topK": "5",
        "maxTokens": "99",
        "seed": "3",
        "thinkingBudget": "0",
    }.items():
        page.one(f"[name={name}]").send_keys(value)
    page.one("[name=topP]").send_keys("7")  # out of bounds: not kept
    page.js("document.querySelector('[name=draft][value=lookup]').click()")
    page.one("[name=depth]").send_keys("4")
    page.click("#settings .button.primary")
    page.load()
    page.ask("hello")
    body = page.server.bodies[-1]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    wanted = {"temperature": 0.25, "top_k": 5, "max_completion_tokens": 99, "seed": 3, "thinking_budget": 0}
    assert {name: body[name] for name in wanted} == wanted
    assert body["speculative"] == {"draft": "lookup", "depth": 4}
    assert "top_p" not in body and "min_p" not in body
    page.click("[aria-label=Settings]")
    page.click("#settings .dialog-foot .button:not(.primary)")
    page.keys(Keys.ESCAPE)
    page.ask("hello again")
    assert not set(wanted) & set(page.server.bodies[-1])


def test_the_engine_is_watched_live(page: Page) -> None:
    page.server.stats |= {
        "running": 3,
        "waiting": 1,
        "cache_usage": 0.375,
        "tokens_per_second": 184.3,
        "accepted_share": 0.713,
        "tokens_per_round": 2.84,
        "arms": {"plain": 25, "mtp": 50, "model": 25},
    }
    page.click(".engine-button")
    page.wait(lambda: page.texts(".tile-value") == ["184", "71 %", "2.84", "3 · 1 waiting", "38 %"])
    assert page.texts(".engine .legend li") == ["Plain 25 %", "MTP head 50 %", "Draft model 25 %"]
    assert not page.one(".engine-problem").is_displayed()
    page.server.stats |= {"tokens_per_second": 12.0, "warnings": ["Almost no draft is accepted."]}
    page.wait(lambda: page.texts(".tile-value")[0] == "12.0")
    assert page.one(".engine-problem").text == "Almost no draft is accepted."
    assert "L" in page.js("return document.querySelector('.spark .line').getAttribute('d')")
    page.click(".engine-button")
    assert not page.one("#engine").is_displayed()


def test_themes_follow_the_system_until_one_is_chosen(page: Page) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    page.screen(1280, 800, "light")
    light = page.js(background)
    page.screen(1280, 800, "dark")
    dark = page.js(background)
    assert light != dark
    page.click("[aria-label='Theme: as the system']")
    assert page.js(background) == light
    page.load()
    assert page.js(background) == light
    page.click("[aria-label='Theme: light']")
    page.screen(1280, 800, "light")
    assert page.js(background) == dark


def test_small_screens_have_a_drawer_and_no_sideways_scrolling(page: Page) -> None:
    page.screen(360, 740, touch=True)
    page.server.scripts["wide"] = Script(
        [("mtp", ["```\n", "x" * 300, "\n```\n\n|a|b|\n|-|-|\n|", "y" * 80, "|", "z" * 80, "|\n\n", "w" * 200])]
    )
    page.ask("wide")
    page.click(".engine-button")
    for _ in range(2):
        assert page.js("return document.documentElement.scrollWidth") == 360
        assert page.js("return document.querySelector('#log').scrollWidth") == 360
        page.click("#show-drafts")
    assert not page.one(".sidebar").is_displayed()
    page.click(".show-sidebar")
    page.wait(lambda: page.one(".chat-open").is_displayed())
    page.keys(Keys.ESCAPE)
    page.wait(lambda: not page.one(".sidebar").is_displayed())


def test_everything_that_can_be_used_has_a_name(page: Page) -> None:
    page.ask("hello")
    page.click("[aria-label=Settings]")
    nameless = """return [...document.querySelectorAll("button, input, textarea, select")].filter((e) =>
        e.type !== "file" && !e.getAttribute("aria-label") && !e.textContent.trim() && !e.labels?.length)
        .map((e) => e.outerHTML)"""
    assert page.js(nameless) == []
    assert page.js("return document.querySelectorAll('[style*=expression], [onclick]').length") == 0


def test_conversations_go_out_and_come_back(page: Page, tmp_path: Path) -> None:
    page.ask("keep this")
    text = page.module(
        "const { exportText } = await load('conversations.js'); const { openStore } = await load('store.js');"
        "return exportText(await (await openStore()).all());"
    )
    data = json.loads(text)
    data["conversations"][0]["title"] = "From a file"
    data["conversations"][0]["nodes"]["9"] = {"parent": "77", "role": "user", "content": "an orphan"}
    data["conversations"].append({"nodes": "nonsense"})
    file = tmp_path / "chats.json"
    file.write_text(json.dumps(data))
    page.one("input[type=file]").send_keys(str(file))
    page.wait(lambda: sorted(page.texts(".chat-open")) == ["From a file", "keep this"])
    page.js("[...document.querySelectorAll('.chat-open')].find((e) => e.textContent === 'From a file').click()")
    page.wait(lambda: page.texts(".bubble") == ["keep this"])
    assert page.answer() == "You said: keep this"
    file.write_text("not json")
    page.one("input[type=file]").send_keys(str(file))
    page.wait(lambda: "This file is not JSON." in page.texts(".toast span"))
