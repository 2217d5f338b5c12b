"""What has been said of an answer, in pieces; where white space goes is decided here.

Content is passed on as it is, but for white space beside a tool call or after thinking: it is said only if text comes
on both sides of it. So an answer "Let me look.\\n\\n" + call + "\\n" says "Let me look.", and what stands between two
texts stays between them. Thinking loses the white space at its two ends.
"""

from __future__ import annotations

from forerun.serve.parsing.json_text import SPACE
from forerun.serve.parsing.pieces import CallArguments, CallEnd, CallStart, Content, Piece, Reasoning

_Kind = type[Reasoning] | type[Content] | type[CallStart] | type[CallArguments]


class PieceCollector:
    """Collects pieces; adjacent ones of a kind become one."""

    def __init__(self, *, hold_spaces: bool) -> None:
        """`hold_spaces`: calls or thinking may come, so white space waits for what follows it."""
        self._hold = hold_spaces
        self._pieces: list[tuple[_Kind | None, list[str]]] = []  # None: the end of a call
        self._spaces: list[str] = []  # white space that waits
        self._pause: list[str] = []  # white space at the end of the thinking so far
        self._text = False  # some content has been said
        self._beside = False  # a call or thinking came since the last content

    def take(self) -> list[Piece]:
        """What is new."""
        pieces, self._pieces = self._pieces, []
        return [CallEnd() if kind is None else kind("".join(parts)) for kind, parts in pieces]

    def content(self, text: str) -> None:
        """More of the answer's own text."""
        if self._beside and not self._text:
            self._spaces.clear()
            text = text.lstrip(SPACE)
        kept = text.rstrip(SPACE) if self._hold else text
        if kept:
            self._add_content("".join(self._spaces) + kept)
            self._spaces.clear()
        self._spaces.append(text[len(kept) :])

    def reasoning(self, text: str) -> None:
        """More of the thinking."""
        kept = text.rstrip(SPACE)
        if kept:
            self._beside = True
            self._add(Reasoning, "".join(self._pause) + kept)
            self._pause.clear()
        self._pause.append(text[len(kept) :])

    def thought(self) -> None:
        """Thinking is over, even if there was none."""
        self._beside = True
        self._pause.clear()

    def start(self, name: str) -> None:
        """A call begins."""
        self._beside = True
        self._pieces.append((CallStart, [name]))

    def arguments(self, text: str) -> None:
        """More of its arguments."""
        self._add(CallArguments, text)

    def end(self) -> None:
        """The call is over."""
        self._pieces.append((None, []))

    def finish(self) -> None:
        """The answer is over: white space after text is part of it, after a call or thinking it is not."""
        if not self._beside:
            self._add_content("".join(self._spaces))
        self._add(Reasoning, "".join(self._pause))

    def _add_content(self, text: str) -> None:
        if text:
            self._text, self._beside = True, False
            self._add(Content, text)

    def _add(self, kind: _Kind, text: str) -> None:
        if not text:
            return
        if self._pieces and self._pieces[-1][0] is kind:
            self._pieces[-1][1].append(text)
        else:
            self._pieces.append((kind, [text]))
