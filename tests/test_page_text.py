"""What the page makes of text, in a real browser: markdown for every prefix, events for every cut of their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("selenium")
pytest.importorskip("fastapi")

from browser import Page, opened
from page_server import FakeServer, running
from selenium import webdriver

SHOWN = """
const { MarkdownView } = await load("markdown.js");
return values[0].map((text) => { const view = new MarkdownView(); view.update(text); return view.root.innerHTML; });
"""
CASES = {
    # inside a line
    "a **b *c* d** e": "<p>a <strong>b <em>c</em> d</strong> e</p>",
    "***both*** and ~~gone~~": "<p><strong><em>both</em></strong> and <del>gone</del></p>",
    "**a *b***": "<p><strong>a <em>b</em></strong></p>",
    "2 * 3 * 4 and snake_case_name": "<p>2 * 3 * 4 and snake_case_name</p>",
    "not closed **yet": "<p>not closed **yet</p>",
    "`a < b` and ``c ` d`` and `open": "<p><code>a &lt; b</code> and <code>c ` d</code> and `open</p>",
    "**`**`**": "<p><strong><code>**</code></strong></p>",
    r"\*plain\* 1\. <i>": "<p>*plain* 1. &lt;i&gt;</p>",
    "one\ntwo": "<p>one<br>two</p>",
    "[a *b*](https://x.org/y_(z) 'title')": (
        '<p><a href="https://x.org/y_(z)" target="_blank" rel="noopener noreferrer">a <em>b</em></a></p>'
    ),
    "see https://x.org/a_b_c.": (
        '<p>see <a href="https://x.org/a_b_c" target="_blank" rel="noopener noreferrer">https://x.org/a_b_c</a>.</p>'
    ),
    "[x](javascript:alert(1))": "<p>x (javascript:alert(1))</p>",
    "[x](/relative) [y] [z](": "<p>x (/relative) [y] [z](</p>",
    # blocks
    "# One\n### Three ##\ntext": "<h1>One</h1><h3>Three</h3><p>text</p>",
    "#hashtag": "<p>#hashtag</p>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "> a\n> - b\n\nc": "<blockquote><p>a</p><ul><li>b</li></ul></blockquote><p>c</p>",
    "- a\n- b\n  - c\n    - d\n- e": "<ul><li>a</li><li>b<ul><li>c<ul><li>d</li></ul></li></ul></li><li>e</li></ul>",
    "1. a\n   - b\n2. c": "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>",
    "1. a\n\n2. b": "<ol><li><p>a</p></li><li><p>b</p></li></ol>",
    "3) a\n4) b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "Things:\n* a\n* b": "<p>Things:</p><ul><li>a</li><li>b</li></ul>",
    "- [x] a\n- [ ] b": (
        '<ul><li class="task"><input type="checkbox" disabled="" checked="">a</li>'
        '<li class="task"><input type="checkbox" disabled="">b</li></ul>'
    ),
    "In 1990. b": "<p>In 1990. b</p>",
    "|a|b|\n|:-:|-:|\n|`x|y`|\\||": (
        '<div class="table" tabindex="0" role="region" aria-label="Table"><table>'
        '<thead><tr><th class="to-center">a</th><th class="to-right">b</th></tr></thead>'
        '<tbody><tr><td class="to-center"><code>x|y</code></td>'
        '<td class="to-right">|</td></tr></tbody></table></div>'
    ),
    "a | b": "<p>a | b</p>",
}
LONG = """# Title

Some *words* with `code`, a [link](https://x.org) and **bold
over lines**.

1. one
   - two

   more of one
2. three

> quote
> > deeper

| a | b |
|--:|:--|
| 1 | **2** |

```python
def f(x):
    return "``"  # ~~~
```

~~~
plain
~~~
- [ ] end"""


@pytest.fixture(scope="module")
def page(browser: webdriver.Chrome) -> Iterator[Page]:
    with running(FakeServer()) as fake, opened(browser, fake) as found:
        yield found


def shown(page: Page, *texts: str) -> list[str]:
    return list(page.module(SHOWN, texts))


def test_markdown_becomes_what_it_should(page: Page) -> None:
    assert dict(zip(CASES, shown(page, *CASES), strict=True)) == CASES


def test_code_keeps_every_character(page: Page) -> None:
    code = "x = \"a\\\"b\"  # 'it's'\n\n\tif x:\r\n  <b>&amp;</b>\n'''open"
    for language in ("python", "js", "rust", "sql", "html", "yaml", "json", "c++", "sh", "css", "unknown", ""):
        script = (
            "const { highlight } = await load('highlight.js'); const box = document.createElement('code');"
            "box.append(...highlight(...values)); return box.textContent;"
        )
        assert page.module(script, language, code) == code


def test_half_a_fence_is_code_already(page: Page) -> None:
    whole, *parts = shown(page, "```py\nx = 1\n```", "```py\nx = 1", "```py\nx = 1\n", "```py\nx = 1\n``")
    text = (
        "const box = document.createElement('div'); box.innerHTML = arguments[0];"
        "return box.querySelector('code').textContent"
    )
    assert [page.js(text, part).rstrip("\n") for part in (whole, *parts)] == ["x = 1"] * 4


def test_growing_text_shows_the_same_as_the_whole(page: Page) -> None:
    script = """
    const { MarkdownView } = await load("markdown.js");
    const growing = new MarkdownView();
    const wrong = [];
    for (let end = 0; end <= values[0].length; end += 1) {
      const fresh = new MarkdownView();
      growing.update(values[0].slice(0, end));
      fresh.update(values[0].slice(0, end));
      if (growing.root.innerHTML !== fresh.root.innerHTML) wrong.push(end);
    }
    return wrong;
    """
    assert page.module(script, LONG) == []


def test_what_is_done_is_not_made_again(page: Page) -> None:
    script = """
    const { MarkdownView } = await load("markdown.js");
    const view = new MarkdownView();
    view.update("done\\n\\n```js\\nlet a");
    const before = [...view.root.children];
    view.update("done\\n\\n```js\\nlet a = 1;\\n");
    return before.map((node, index) => node === view.root.children[index]);
    """
    assert page.module(script) == [True, True]


@pytest.mark.parametrize(
    "text", ["*a ", "**a", "[", "[a](", "> ", "- ", "`", "``a", "| ", "_a", "<", "1. ", "#", "\\", "~~"]
)
def test_no_text_takes_long(page: Page, text: str) -> None:
    script = """
    const { MarkdownView } = await load("markdown.js");
    const begin = performance.now();
    for (const joint of ["", "\\n"]) new MarkdownView().update(Array(5000).fill(values[0]).join(joint));
    return performance.now() - begin;
    """
    assert page.module(script, text) < 3000


def test_events_do_not_depend_on_how_bytes_are_cut(page: Page) -> None:
    script = """
    const { serverEvents } = await load("api.js");
    const bytes = new TextEncoder().encode(values[0]);
    const read = async (cuts) => {
      const stream = new ReadableStream({ start(controller) {
        [0, ...cuts].forEach((cut, index) => controller.enqueue(bytes.slice(cut, cuts[index] ?? bytes.length)));
        controller.close();
      } });
      const found = [];
      for await (const data of serverEvents(stream)) found.push(data);
      return found;
    };
    const all = [await read([...bytes.keys()].slice(1))];
    for (let cut = 0; cut <= bytes.length; cut += 1) all.push(await read([cut]));
    return [...new Set(all.map((found) => JSON.stringify(found)))];
    """
    text = 'data: {"a": "é🙂"}\r\n\r\n: ping\r\n\r\ndata:one\rdata: two\r\revent: x\ndata: [DONE]\n\ndata: cut off'
    found: Any = page.module(script, text)
    assert found == ['["{\\"a\\": \\"é🙂\\"}","one\\ntwo","[DONE]"]']
