"""The loop of `forerun chat`: read a message, answer it, say what it took; Ctrl-C stops an answer, twice it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import TYPE_CHECKING

from forerun.cli.chat_screen import (
    AnswerScreen,
    MarkdownScreen,
    TextScreen,
    arm_style,
    summary_line,
)
from forerun.cli.chat_session import Again, Leave, Session
from forerun.cli.chat_talkers import ReplyPiece
from forerun.cli.prompt import require_unicode
from forerun.errors import ForerunError

if TYPE_CHECKING:
    from rich.console import Console

QUOTES = '"""'
Read = Callable[[str], str]  # a line for a prompt; EOFError at the end


class ChatLoop:
    """Runs until the user leaves. `notes` is where everything goes that is not an answer."""

    def __init__(self, session: Session, read: Read, out: Console, notes: Console, *, plain: bool, quiet: bool) -> None:
        self._session, self._read, self._out, self._notes = session, read, out, notes
        self._plain, self._quiet = plain, quiet
        self._pressed = False  # Ctrl-C, since the last line that was typed
        self.failures = 0

    def run(self) -> None:
        """Everything until the end of input."""
        while True:
            try:
                message, quoted = self._message()
                self._pressed = False
                if message.startswith("/") and not quoted:
                    self._obey(message)
                elif message:
                    self._say(message)
            except Leave:
                return
            except EOFError:
                if self._notes.is_terminal:
                    self._notes.print()  # the shell's prompt would stand behind ours
                return
            except KeyboardInterrupt:
                if self._pressed:
                    return
                self._pressed = True
                self._note("\nCtrl-C again leaves")
            except ForerunError as error:
                self.failures += 1
                self._notes.print(f"forerun: {error}", markup=False, soft_wrap=True)

    def _message(self) -> tuple[str, bool]:
        """One line, or the lines between two times three quotes; and whether there were quotes."""
        line = self._line("> ")
        if not line.lstrip().startswith(QUOTES):
            return line.strip(), False
        lines = [line.lstrip().removeprefix(QUOTES)]
        while not lines[-1].rstrip().endswith(QUOTES):
            try:
                lines.append(self._line(". "))
            except EOFError:
                raise ForerunError(f"the message has no end and was not sent: end it with {QUOTES}") from None
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
        return "\n".join(lines).strip("\n"), True

    def _line(self, prompt: str) -> str:
        return require_unicode(self._read(prompt), "the line")

    def _obey(self, command: str) -> None:
        try:
            said = self._session.obey(command)
        except Again:
            self._regenerate()
        else:
            if said:
                self._notes.print(said, markup=False, highlight=False, soft_wrap=True)

    def _say(self, message: str) -> None:
        turns = self._session.turns
        self._session.say(message)
        turn = turns[-1]
        try:
            self._answer()
        except (ForerunError, KeyboardInterrupt) as error:
            if turns[-1] is turn:
                turns.pop()  # as if it had not been said: the next one may fit
            if self._pressed or isinstance(error, ForerunError):
                raise
            self._pressed = True
            self._note("stopped · Ctrl-C again leaves")
        finally:
            self._session.attached.clear()

    def _regenerate(self) -> None:
        options, turns = self._session.options, self._session.turns
        if not self._session.sampled or options.seed is not None:
            self._note("the same text will come: /set temperature=0.8 or another seed changes that")
        before = turns.pop() if turns[-1]["role"] == "assistant" else None
        try:
            self._answer()
        except (ForerunError, KeyboardInterrupt):
            if before is not None and turns[-1]["role"] != "assistant":
                turns.append(before)  # there is no other answer
            raise

    def _answer(self) -> None:
        session, arms = self._session, dict[str, None]()
        screen, text = self._screen(), list[str]()

        def follow(pieces: Iterable[ReplyPiece]) -> None:
            for piece in pieces:
                arms.setdefault(piece.arm)
                if not piece.thought:
                    text.append(piece.text)
                screen.show(piece)

        with closing(session.talker.answer(session.messages, session.options)) as reply:
            try:
                follow(reply)
            except KeyboardInterrupt:
                self._pressed = True
                follow(reply.rest())
            finally:
                screen.end()
            session.turns.append({"role": "assistant", "content": "".join(text)})
            summary = reply.summary()
        session.totals.add(summary)
        told = summary_line(summary, sampled=session.sampled)
        self._note(("stopped · " if self._pressed else "") + told)
        if summary.proof is not None:
            self._notes.print(summary.proof, markup=False, highlight=False, soft_wrap=True)
        if session.colour:
            self._legend([arm for arm in arms if arm])
        for warning in summary.warnings:
            self._notes.print(f"forerun: warning: {warning}", markup=False, soft_wrap=True)

    def _screen(self) -> AnswerScreen:
        colour = self._out.is_terminal and self._session.colour
        if self._out.is_terminal and not colour and not self._plain:
            return MarkdownScreen(self._out)
        return TextScreen(self._out, colour)

    def _legend(self, arms: list[str]) -> None:
        from rich.text import Text

        parts = [Text("the model"), *(Text(arm, style=arm_style(arm)) for arm in arms)]
        self._notes.print(Text(" · ").join(parts))

    def _note(self, text: str) -> None:
        if not self._quiet:
            self._notes.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)
