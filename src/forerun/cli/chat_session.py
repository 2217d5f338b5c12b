"""What a chat knows: the conversation, how to answer, what it has cost; and the commands that change these."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from forerun.cli.chat_media import attached_part, is_kept_content
from forerun.cli.chat_talkers import ReplySummary, Talker, saved_seconds
from forerun.cli.generation_flags import SHORT_NAMES, parse_option
from forerun.errors import ForerunError
from forerun.home import expanded
from forerun.media.parts import Kind
from forerun.options import GenerationOptions
from forerun.text.messages import Message

FORMAT = "forerun-chat"
ROLES = ("system", "user", "assistant")
NOT_SET_HERE = {
    "system": "use /system TEXT",
    "raw": "a chat needs its template",
    "images": "use /image FILE",
    "videos": "use /video FILE",
    "audio": "use /audio FILE",
}
HELP = """\
/save FILE       keep the conversation        /load FILE    take it up again
/clear           forget the conversation      /system TEXT  set the system message; without TEXT: drop it
/regen           answer the last one again    /stats        what this chat has cost and saved
/set NAME=VALUE  an option of the generation  /set          show those that are set
/image FILE      show it with the next message; so do /video FILE and /audio FILE
/colour          show who drafted each token  /help         this list
/exit            leave; so does Ctrl-D
\"\"\" begins and ends a message of several lines. Ctrl-C stops an answer, twice it leaves."""


class Leave(Exception):
    """The user wants to go."""


class Again(Exception):
    """The last message is to be answered again."""


@dataclass(slots=True)
class ChatTotals:
    """Of all answers."""

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of decoding, where it is known
    timed: int = 0  # tokens of those
    saved: float = 0.0
    read: int = 0  # tokens of prompts
    cached: int = 0  # part of them: the cache had them

    def add(self, summary: ReplySummary) -> None:
        self.answers += 1
        self.tokens += summary.tokens
        if summary.tokens_per_second:
            self.seconds += summary.tokens / summary.tokens_per_second
            self.timed += summary.tokens
        self.saved += summary.seconds_saved or 0.0
        self.read += summary.prompt_tokens
        self.cached += summary.cached_tokens

    def line(self) -> str:
        rate = f" · {self.timed / self.seconds:.1f} tok/s" if self.seconds else ""
        answers = f"{self.answers} answer{'' if self.answers == 1 else 's'}"
        found = f" · {self.cached} of {self.read} prompt tokens from the cache" if self.read else ""
        return f"{answers} · {self.tokens} tokens{rate}{found} · {saved_seconds(self.saved)}"


@dataclass(slots=True)
class Session:
    """One conversation with one talker."""

    talker: Talker
    options: GenerationOptions
    system: str | None = None
    colour: bool = False
    turns: list[Message] = field(default_factory=list)  # user and assistant, in turn
    totals: ChatTotals = field(default_factory=ChatTotals)
    attached: list[dict[str, str]] = field(default_factory=list)  # files for the next message

    def say(self, text: str) -> None:
        """A turn of the user's, with what is attached before its text."""
        content: Any = [*self.attached, {"type": "text", "text": text}] if self.attached else text
        self.turns.append({"role": "user", "content": content})

    def attach(self, kind: Kind, name: str) -> str:
        """A file for the next message."""
        part = attached_part(kind, name)
        self.talker.check_media(kind)
        self.attached.append(part)
        return f"{Path(name).name} goes with the next message"

    @property
    def messages(self) -> list[Message]:
        """All of it, as a template takes it."""
        first: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        return first + self.turns

    @property
    def sampled(self) -> bool:
        """Would another seed give another answer?"""
        return bool(self.options.with_defaults(self.talker.defaults).temperature)

    def obey(self, line: str) -> str | None:
        """Carry out a command and return what to say about it."""
        word, _, rest = line[1:].partition(" ")
        commands: dict[str, Callable[[str], str | None]] = {
            "save": self._save,
            "load": self._load,
            "clear": self._clear,
            "system": self._system,
            "regen": self._regenerate,
            "stats": self._stats,
            "set": self._set,
            "image": lambda name: self.attach("image", name),
            "video": lambda name: self.attach("video", name),
            "audio": lambda name: self.attach("audio", name),
            "colour": self._colour,
            "color": self._colour,
            "help": lambda _: HELP,
            "?": lambda _: HELP,
            "exit": self._leave,
            "bye": self._leave,
            "quit": self._leave,
        }
        if word not in commands:
            raise ForerunError(f'there is no command /{word}: see /help, or put it between """ to say it to the model')
        return commands[word](rest.strip())

    def _save(self, name: str) -> str:
        file = _file(name, "/save")
        kept = {"format": FORMAT, "system": self.system, "options": _changed(self.options), "messages": self.turns}
        try:
            file.write_text(json.dumps(kept, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ForerunError(f"cannot write {file}: {error.strerror}") from error
        return f"{len(self.turns)} messages are in {file}"

    def _load(self, name: str) -> str:
        file = _file(name, "/load")
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ForerunError(f"cannot read {file}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ForerunError(f"{file} is not JSON: {error}") from error
        turns, system = _checked_turns(kept, file), kept.get("system")
        if system is not None and not isinstance(system, str):
            raise ForerunError(f"{file}: system must be a text")
        given = kept.get("options") or {}
        if not isinstance(given, dict):
            raise ForerunError(f"{file}: options must be an object")
        options = GenerationOptions.of(_read_options(given, file))
        self.talker.check(options)
        self.turns, self.system, self.options, self.attached = turns, system, options, []
        return f"{len(turns)} messages from {file}"

    def _clear(self, _: str) -> str:
        self.turns.clear()
        self.attached.clear()
        return "the conversation is forgotten" + ("" if self.system is None else "; the system message stays")

    def _system(self, text: str) -> str:
        self.system = text or None
        return "the system message is set" if text else "no system message"

    def _regenerate(self, _: str) -> str | None:
        if not self.turns:
            raise ForerunError("there is nothing to answer yet")
        raise Again

    def _stats(self, _: str) -> str:
        return self.totals.line()

    def _set(self, text: str) -> str:
        if not text:
            changed = _changed(self.options)
            return " ".join(f"{name}={value}" for name, value in changed.items()) or "everything is at its default"
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        name = SHORT_NAMES.get(name, name)
        if name in NOT_SET_HERE:
            raise ForerunError(f"{name} is not set this way: {NOT_SET_HERE[name]}")
        if not equals:
            raise ForerunError("write /set NAME=VALUE, for example /set temperature=0.8")
        options = replace(self.options, **{name: parse_option(name, value.strip())})
        self.talker.check(options)
        self.options = options
        return f"{name}={getattr(options, name)}"

    def _colour(self, _: str) -> str:
        self.colour = not self.colour
        return "accepted drafts are coloured" if self.colour else "no colours"

    def _leave(self, _: str) -> None:
        raise Leave


def _file(name: str, command: str) -> Path:
    if not name:
        raise ForerunError(f"{command} needs the name of a file")
    return expanded(name)


def _changed(options: GenerationOptions) -> dict[str, Any]:
    """What is not at its default, ready for JSON."""
    values = {entry.name: getattr(options, entry.name) for entry in fields(options)}
    changed = {entry.name: values[entry.name] for entry in fields(options) if values[entry.name] != entry.default}
    return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in changed.items()}


def _read_options(given: dict[str, Any], file: Path) -> dict[str, Any]:
    """JSON has texts for keys."""
    if isinstance(given.get("logit_bias"), dict):
        try:
            given = given | {"logit_bias": {int(token): bias for token, bias in given["logit_bias"].items()}}
        except ValueError:
            raise ForerunError(f"{file}: logit_bias must have token ids for keys") from None
    return given


def _checked_turns(kept: Any, file: Path) -> list[Message]:
    if not isinstance(kept, dict) or kept.get("format") != FORMAT or not isinstance(kept.get("messages"), list):
        raise ForerunError(f"{file} is not a chat that /save wrote")
    for message in kept["messages"]:
        good = isinstance(message, dict) and message.get("role") in ROLES
        if not good or not is_kept_content(message.get("content")):
            raise ForerunError(f"{file}: every message needs a role ({', '.join(ROLES)}) and a content")
    return [{"role": message["role"], "content": message["content"]} for message in kept["messages"]]
