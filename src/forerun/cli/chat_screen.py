"""How an answer is shown while it comes: plain text, rendered markdown, or coloured by who drafted each token."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Protocol

from forerun.cli.chat_talkers import ReplyPiece, ReplySummary, saved_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

ARM_STYLES = {"mtp": "green", "assistant": "green", "lookup": "cyan", "long lookup": "bright_blue", "model": "magenta"}
OTHER_ARM = "yellow"
THOUGHT = "dim italic"
FRAME = 0.08  # seconds between two pictures of the block in the making
FENCE = re.compile(r" {0,3}(```+|~~~+)")
LIST_ITEM = re.compile(r"(?:[-*+]|\d{1,9}[.)])\s")
# All control characters but the line break and the tab: a model must not move the cursor or set a terminal's title.
CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in (0x09, 0x0A)}


class AnswerScreen(Protocol):
    """Shows one answer."""

    def show(self, piece: ReplyPiece) -> None: ...

    def end(self) -> None:
        """No more comes; the cursor is at the beginning of a line afterwards."""
        ...


class TextScreen:
    """The text as it is, for pipes and `--plain`; or every token in the colour of its drafter.

    Thoughts are no part of the answer: without colours they are left out.
    """

    def __init__(self, console: Console, colour: bool) -> None:
        self._console, self._colour, self._last = console, colour, "\n"

    def show(self, piece: ReplyPiece) -> None:
        from rich.text import Text

        text = clean(piece.text) if self._console.is_terminal else piece.text
        if not text or (piece.thought and not self._colour):
            return
        self._last = text[-1]
        if self._colour:
            style = THOUGHT if piece.thought else arm_style(piece.arm)
            self._console.print(Text(text, style=style), end="", soft_wrap=True)
        else:
            self._console.file.write(text)
            self._console.file.flush()

    def end(self) -> None:
        if self._last != "\n":
            self._console.file.write("\n")
            self._console.file.flush()


class MarkdownScreen:
    """Blocks are printed for good when they are complete; below them the one in the making is drawn again and again."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._text, self._thought, self._drawn = "", "", 0.0
        self._live: Live | None = None

    def show(self, piece: ReplyPiece) -> None:
        if piece.thought:
            self._thought += clean(piece.text)
        else:
            self._settle_thought()
            self._text += clean(piece.text)
        finished, self._text = split_finished(self._text)
        if finished:
            self._print(finished)
        if time.perf_counter() - self._drawn >= FRAME:
            self._draw()

    def end(self) -> None:
        self._settle_thought()
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._text.strip():
            self._print(self._text)
        self._text = ""

    def _settle_thought(self) -> None:
        if self._thought:
            from rich.text import Text

            thought, self._thought = self._thought, ""
            self._console.print(Text(thought.strip() + "\n", style=THOUGHT))

    def _print(self, text: str) -> None:
        from rich.markdown import Markdown

        self._console.print(Markdown(text))
        self._console.print()

    def _draw(self) -> None:
        """The unfinished block; of a long one only the end, as much as fits the window."""
        from rich.console import Group
        from rich.live import Live
        from rich.markdown import Markdown
        from rich.segment import Segment, Segments
        from rich.text import Text

        self._drawn = time.perf_counter()
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        block = Text(self._thought, style=THOUGHT) if self._thought else Markdown(self._text)
        lines = self._console.render_lines(block, pad=False)[-max(1, self._console.height - 2) :]
        shown = [segment for line in lines for segment in (*line, Segment.line())]
        self._live.update(Group(Segments(shown[:-1])), refresh=True)


def clean(text: str) -> str:
    """Without control characters."""
    return text.translate(CONTROLS)


def arm_style(arm: str) -> str:
    """The colour of a drafter; the model's own words have none."""
    return ARM_STYLES.get(arm, OTHER_ARM) if arm else ""


def split_finished(text: str) -> tuple[str, str]:
    """Markdown that later text cannot change, and the rest: cut before a paragraph, never in code or in a list."""
    fence, position, cut = "", 0, 0
    blank, in_list = False, False
    for line in text.splitlines(keepends=True):
        opened = FENCE.match(line)
        item = LIST_ITEM.match(line) is not None
        if not fence and blank and line.strip() and not line[0].isspace() and not (item and in_list):
            cut, in_list = position, False
        if opened and not fence:
            fence = opened[1]
        elif opened and opened[1].startswith(fence) and not line.strip().strip("`~"):
            fence = ""
        in_list = in_list or item
        blank = not line.strip() and not fence
        position += len(line)
    return text[:cut], text[cut:]


def summary_line(summary: ReplySummary, sampled: bool = False) -> str:
    """`128 tokens · 71.3 tok/s · 2.31 tokens/round · 0.8 s saved`."""
    parts = [f"{summary.tokens} token{'' if summary.tokens == 1 else 's'}"]
    if summary.tokens_per_second:
        parts.append(f"{summary.tokens_per_second:.1f} tok/s")
    if summary.tokens_per_round is not None:
        parts.append(f"{summary.tokens_per_round:.2f} tokens/round")
    if summary.seconds_saved is not None:
        parts.append(saved_seconds(summary.seconds_saved))
    if sampled and summary.seed is not None:
        parts.append(f"seed {summary.seed}")
    if summary.length:
        parts.append("length limit reached")
    if summary.guaranteed is False:
        parts.append("same text as plain decoding: NOT GUARANTEED")
    return " · ".join(parts)
