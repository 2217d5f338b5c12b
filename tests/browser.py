"""Chromium without a window for tests of the page, and a hand that clicks and types in it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from page_server import FakeServer
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

Found = TypeVar("Found")

PATIENCE = 10.0  # seconds
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,800",
)
COMPLETE = """
const answers = document.querySelectorAll(".message.assistant");
return answers.length > 0 && !document.querySelector(".send.stop") &&
    answers[answers.length - 1].getAttribute("aria-busy") === "false";
"""


@contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """A browser with a profile of its own. Without one, tests are skipped, but never where CI is set."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not program or not driver:
        missing = "The tests of the page need chromium and chromedriver (apt-get install chromium chromium-driver)."
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    options = webdriver.ChromeOptions()
    options.binary_location = program
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        try:
            yield browser
        finally:
            browser.quit()


class Page:
    """The page of one server. Each server has its own port, so that storage is empty at first."""

    def __init__(self, browser: webdriver.Chrome, server: FakeServer) -> None:
        self.browser, self.server = browser, server
        self.expected = ""  # part of a console message that is not a fault: "401"
        self.load()

    def load(self) -> None:
        """Until the server has told which model it has, or that it wants a key."""
        self.browser.get(self.server.url)
        self.wait(lambda: self.js("return document.title !== 'forerun' || document.querySelector('dialog[open]')"))

    def js(self, script: str, *values: Any) -> Any:
        return self.browser.execute_script(script, *values)  # type: ignore[no-untyped-call]

    def module(self, script: str, *values: Any) -> Any:
        """What an asynchronous script returns; `load` imports one of the page's modules."""
        body = (
            "const done = arguments[arguments.length - 1]; const load = (name) => import('/page/' + name);"
            f"(async (...values) => {{ {script} }})(...arguments)"
            ".then(done, (error) => done('failed: ' + error.stack));"
        )
        return self.browser.execute_async_script(body, *values)  # type: ignore[no-untyped-call]

    def wait(self, condition: Callable[[], Found]) -> Found:
        return WebDriverWait(self.browser, PATIENCE, poll_frequency=0.02).until(lambda _: condition())

    def all(self, selector: str) -> list[WebElement]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """All of its text, seen or not; empty where there is nothing."""
        return str(self.js("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def texts(self, selector: str) -> list[str]:
        return list(self.js("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector))

    def click(self, selector: str) -> None:
        self.wait(lambda: self.all(selector))
        self.one(selector).click()

    def keys(self, *keys: str) -> None:
        """To whatever has the focus."""
        self.browser.switch_to.active_element.send_keys(*keys)

    def send(self, question: str) -> None:
        field = self.one("#prompt")
        field.send_keys(question)
        field.send_keys(Keys.ENTER)

    def ask(self, question: str) -> str:
        """The text of the whole answer."""
        before = len(self.server.bodies)
        self.send(question)
        self.wait(lambda: len(self.server.bodies) > before)
        return self.answer()

    def answer(self) -> str:
        """The last answer, when it is over."""
        self.wait(lambda: self.js(COMPLETE))
        return self.texts(".message.assistant .answer-body")[-1]

    def screen(self, width: int, height: int, theme: str = "light", touch: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": touch}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)  # type: ignore[no-untyped-call]
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})  # type: ignore[no-untyped-call]

    def faults(self) -> list[str]:
        """Errors on the console, broken policies, and requests to another host."""
        entries = self.browser.get_log("browser")  # type: ignore[no-untyped-call]
        found = [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]
        found = [message for message in found if not (self.expected and self.expected in message)]
        for entry in self.browser.get_log("performance"):  # type: ignore[no-untyped-call]
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                url = message["params"]["request"]["url"]
                if not url.startswith((self.server.url, "data:", "blob:", "chrome:")):
                    found.append(f"request to {url}")
        return found


@contextmanager
def opened(browser: webdriver.Chrome, server: FakeServer) -> Iterator[Page]:
    """The page, which must have had no fault by the end of a test."""
    browser.get_log("browser")  # type: ignore[no-untyped-call]
    browser.get_log("performance")  # type: ignore[no-untyped-call]
    page = Page(browser, server)
    yield page
    faults = page.faults()
    assert not faults, faults
    browser.get("about:blank")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})  # type: ignore[no-untyped-call]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})  # type: ignore[no-untyped-call]
