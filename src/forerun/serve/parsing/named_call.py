"""A call as a name and an object of arguments behind it: Mistral and Gemma write it inside marks of their own."""

from __future__ import annotations

from forerun.serve.parsing.json_text import SPACE, JsonReader, Step
from forerun.serve.parsing.piece_collector import PieceCollector
from forerun.serve.parsing.reader import Closing, ReaderState


class NamedCall(Closing):
    """Arguments are told as they come, once two good letters of an object make it a call."""

    def __init__(self, said: PieceCollector, mark: str, value: JsonReader) -> None:
        super().__init__(said, mark)
        self.name = ""
        self._value = value
        self._text = ""  # of the arguments, until they are told

    def in_arguments(self, letter: str) -> ReaderState:
        """Takes one letter of the object, its opening brace included."""
        step, text = self._value.feed(letter)
        if step in (Step.FAILED, Step.BEFORE) or not (self.started or self._text or letter in "{" + SPACE):
            self.finish()
            return self.failed(letter)
        if self.started and text:
            self.tell(text)
        else:
            self.raw += letter
        if not self.started:
            self._text += text if self._text else text.lstrip(SPACE)
            if len(self._text) > 1 and text.strip(SPACE):
                self.begin(self.name)
                self.tell(self._text)
        if step is not Step.DONE:
            return ReaderState.MORE
        self.end()
        return self.close()

    def finish(self) -> None:
        """Says what the object holds back of a call that was begun."""
        if self.started and self._value.held:
            self.tell(self._value.held)
