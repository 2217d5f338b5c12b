"""Takes the picture of the page that the README shows, from a server that runs: real answers, real figures.

forerun serve &
python scripts/page_picture.py --url http://127.0.0.1:8000 --out docs/page.png
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from selenium import webdriver
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4",
)
QUESTIONS = (
    "Write a Python function that tells whether a number is even, with a docstring, and explain it in one sentence.",
    "Add type hints to it.",
)
OVER = """
const answers = document.querySelectorAll(".message.assistant");
return answers.length === arguments[0] && !document.querySelector(".send.stop");
"""
# A drafted token of the last answer, in the longest of its rounds on the right: there the card covers little.
TOKEN = """
const rounds = [...document.querySelectorAll(".message:last-child .round.several")].filter((round) => {
    const { left, top, bottom } = round.getBoundingClientRect();
    const oneLine = round.getClientRects().length === 1;
    return oneLine && left > innerWidth * 0.52 && top > innerHeight * 0.55 && bottom < innerHeight * 0.85;
});
rounds.sort((a, b) => b.childElementCount - a.childElementCount);
return rounds[0]?.children[1];
"""


def take_picture(
    url: str, questions: Sequence[str], out: Path, theme: str, size: tuple[int, int], scale: float
) -> None:
    """Asks, waits, shows the drafts and points at one of them."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
        try:
            width, height = size
            metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            browser.get(url)
            look = {"theme": theme, "engine": True, "drafts": True}
            kept = {"forerun.look": look, "forerun.request": {"temperature": 0, "maxTokens": 200}}
            for name, value in kept.items():
                browser.execute_script("localStorage.setItem(...arguments)", name, json.dumps(value))
            browser.refresh()
            field = WebDriverWait(browser, 10).until(lambda _: browser.find_element(By.ID, "prompt"))
            time.sleep(2)  # for the model's name, and some seconds of the engine's curves
            for number, question in enumerate(questions, 1):
                field.send_keys(question, Keys.ENTER)
                WebDriverWait(browser, 300).until(lambda _, n=number: browser.execute_script(OVER, n))
            time.sleep(0.5)
            token = browser.execute_script(TOKEN)
            if token is not None:
                ActionChains(browser).move_to_element(token).perform()
            time.sleep(0.3)
            browser.save_screenshot(str(out))
        finally:
            browser.quit()


def main() -> None:
    """What to ask, and where the picture goes."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--url", default="http://127.0.0.1:8000/")
    flags.add_argument("--ask", action="append", help="A question; may be given more than once.")
    flags.add_argument("--out", type=Path, default=Path("docs/page.png"))
    flags.add_argument("--theme", choices=("light", "dark"), default="light")
    flags.add_argument("--size", type=int, nargs=2, default=(1280, 800))
    flags.add_argument("--scale", type=float, default=1.5)
    given = flags.parse_args()
    take_picture(given.url, given.ask or QUESTIONS, given.out, given.theme, given.size, given.scale)
    print(f"{given.out}: {given.out.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
