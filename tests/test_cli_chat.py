"""`forerun chat` with a talker made of scripts: commands, interruptions, what is shown and what is remembered."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import forerun
from forerun.cli.chat_loop import ChatLoop
from forerun.cli.chat_screen import MarkdownScreen, clean, split_finished, summary_line
from forerun.cli.chat_session import ChatTotals, Session
from forerun.cli.chat_talkers import ReplyPiece, ReplySummary
from forerun.cli.main import main
from forerun.errors import ForerunError
from forerun.options import GenerationOptions
from forerun.text.messages import Message

SUMMARY = ReplySummary(tokens=4, tokens_per_second=20.0, tokens_per_round=2.0, seconds_saved=0.5, guaranteed=True)
Script = list[ReplyPiece | BaseException]


class EarlyPress(KeyboardInterrupt):
    """Ctrl-C before the answer has begun."""


class FakeTalker:
    """Says what the next script says; an exception in it is raised there."""

    name = "fake"
    defaults: Mapping[str, float] = {}

    def __init__(self, *scripts: Script) -> None:
        self.scripts, self.asked, self.options = list(scripts), list[list[Message]](), list[GenerationOptions]()
        self.closed, self.blind_to = 0, set[str]()

    def check(self, options: GenerationOptions) -> None:
        options.sampling()

    def check_media(self, kind: str) -> None:
        if kind in self.blind_to:
            raise ForerunError(f"fake cannot take {kind}")

    def answer(self, messages: Sequence[Message], options: GenerationOptions) -> FakeTalker:
        self.asked.append([*messages])
        self.options.append(options)
        self.script = self.scripts.pop(0) if self.scripts else [ReplyPiece("yes")]
        if isinstance(self.script[0], ForerunError | EarlyPress):
            raise self.script[0]
        return self

    def __iter__(self) -> Iterator[ReplyPiece]:
        for piece in self.script:
            if isinstance(piece, BaseException):
                raise piece
            yield piece

    def rest(self) -> Iterator[ReplyPiece]:
        return iter([ReplyPiece(" (rest)")])

    def summary(self) -> ReplySummary:
        return SUMMARY

    def close(self) -> None:
        self.closed += 1


class Typist:
    """Lines to type; an exception among them is a key, and after the last comes Ctrl-D."""

    def __init__(self, *lines: str | BaseException) -> None:
        self.lines, self.prompts = list(lines), list[str]()

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line


def talk(
    talker: FakeTalker, *lines: str | BaseException, terminal: bool = False, colour: bool = False, **flags: Any
) -> tuple[str, str, Session]:
    """Run a chat; what came out, what was noted, and the session."""
    out, notes = io.StringIO(), io.StringIO()
    session = Session(talker, GenerationOptions(), colour=colour)
    consoles = [Console(file=file, force_terminal=terminal, width=80, height=24) for file in (out, notes)]
    loop = ChatLoop(session, Typist(*lines), *consoles, **{"plain": False, "quiet": False, **flags})
    loop.run()
    return out.getvalue(), notes.getvalue(), session


def test_a_conversation_is_remembered() -> None:
    talker = FakeTalker([ReplyPiece("Hello"), ReplyPiece(" you")], [ReplyPiece("Fine")])
    out, notes, session = talk(talker, "hi", "", "  how are you  ")
    assert out == "Hello you\nFine\n"
    assert [message["content"] for message in talker.asked[1]] == ["hi", "Hello you", "how are you"]
    assert notes.count("4 tokens · 20.0 tok/s · 2.00 tokens/round · 0.5 s saved") == 2
    assert session.totals.answers == talker.closed == 2


def test_several_lines_between_quotes() -> None:
    talker = FakeTalker()
    _, _, session = talk(talker, '"""first', "  second", '"""', '"""one"""', '"""', "a", 'b"""')
    asked = [turn["content"] for turn in session.turns if turn["role"] == "user"]
    assert asked == ["first\n  second", "one", "a\nb"]


def test_what_is_between_quotes_is_no_command() -> None:
    """A message that begins with a slash could not be said at all."""
    talker = FakeTalker()
    _, notes, session = talk(talker, "/usr/bin is full", '"""/usr/bin is full"""')
    assert 'there is no command /usr/bin: see /help, or put it between """' in notes
    assert [turn["content"] for turn in session.turns] == ["/usr/bin is full", "yes"]


def test_a_message_without_its_end_is_not_lost_silently() -> None:
    out, notes, _ = talk(FakeTalker(), '"""one', "two")
    assert out == "" and 'the message has no end and was not sent: end it with """' in notes


def test_a_line_that_is_no_text_is_refused_and_the_next_one_is_not() -> None:
    talker = FakeTalker()
    _, notes, session = talk(talker, "caf\udce9", "hi")
    assert "forerun: the line is not UTF-8 text: convert it first\n" in notes
    assert [turn["content"] for turn in session.turns] == ["hi", "yes"]


def test_commands_change_the_session() -> None:
    talker = FakeTalker()
    lines = ("/system Be brief.", "hi", "/set temperature=0.5", "/set", "/clear", "again", "/stats", "/exit", "never")
    _, notes, session = talk(talker, *lines)
    assert talker.asked[0][0] == {"role": "system", "content": "Be brief."}
    assert [message["role"] for message in talker.asked[1]] == ["system", "user"]
    assert [options.temperature for options in talker.options] == [None, 0.5]
    assert "temperature=0.5" in notes and "2 answers · 8 tokens · 20.0 tok/s · 1.0 s saved" in notes
    assert len(talker.asked) == 2 and session.system == "Be brief."


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("/nope", "there is no command /nope"),
        ("/set", "everything is at its default"),
        ("/set temprature=1", "did you mean temperature?"),
        ("/set temperature", "NAME=VALUE"),
        ("/set temperature=hot", "temperature must be a number"),
        ("/set temperature=-1", "temperature"),
        ("/set top_k=1.5", "top_k must be a whole number"),
        ("/set draft=quick", "draft must be one of auto, off, lookup, mtp"),
        ("/set draft-tokens=x", "--draft-tokens x"),
        ("/set system=x", "use /system TEXT"),
        ("/regen", "nothing to answer yet"),
        ("/save", "needs the name of a file"),
        ("/load /there/is/none", "cannot read"),
        ("/save /there/is/none", "cannot write"),
        ("/help", "/save FILE"),
    ],
)
def test_what_commands_say(command: str, said: str) -> None:
    _, notes, session = talk(FakeTalker(), command)
    assert said in notes and session.options == GenerationOptions() and not session.turns


def test_every_option_can_be_set_and_reset() -> None:
    typed = {"logit_bias": "5=-2", "suppress": "1,2", "stop": "END", "draft_tokens": "3", "draft": "off", "seed": "7"}
    *_, session = talk(FakeTalker(), *(f"/set {name}={value}" for name, value in typed.items()))
    options = session.options
    assert options.logit_bias == {5: -2.0} and options.suppress == {1, 2} and options.stops == ("END",)
    assert (options.draft_tokens, options.draft, options.seed) == (3, "off", 7)
    for name in typed:
        session.obey(f"/set {name}=default")
    assert session.options == GenerationOptions()
    assert session.obey("/set temp=0.5") == "temperature=0.5" and session.obey("/set n=9") == "max_tokens=9"


def test_regenerating_replaces_the_last_answer() -> None:
    talker = FakeTalker([ReplyPiece("first")], [ReplyPiece("second")])
    _, notes, session = talk(talker, "hi", "/regen")
    assert talker.asked[0] == talker.asked[1] and [turn["content"] for turn in session.turns] == ["hi", "second"]
    assert "the same text will come" in notes


def test_what_is_not_set_is_as_the_models_makers_recommend() -> None:
    talker = FakeTalker()
    talker.defaults = {"temperature": 0.2, "top_p": 0.9}
    _, notes, session = talk(talker, "hi", "/regen")
    assert "the same text will come" not in notes and session.sampled
    session.obey("/set temperature=0")
    assert not session.sampled
    session.obey("/set temperature=default")
    assert session.sampled
    sampling = session.options.with_defaults(talker.defaults).sampling()
    assert (sampling.temperature, sampling.top_p) == (0.2, 0.9)
    assert GenerationOptions(top_p=0.5).with_defaults(talker.defaults).top_p == 0.5


@pytest.mark.parametrize("failure", [ForerunError("the server is gone"), EarlyPress()])
def test_an_answer_that_cannot_be_made_again_stays(failure: BaseException) -> None:
    """It was gone, and the next message followed the user's own."""
    talker = FakeTalker([ReplyPiece("first")], [failure], [ReplyPiece("third")])
    *_, session = talk(talker, "hi", "/regen", "more")
    assert [turn["content"] for turn in session.turns] == ["hi", "first", "more", "third"]


def test_a_chat_is_saved_and_taken_up_again(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    talk(FakeTalker(), "/system Be.", "/set top_k=5", "/set logit_bias=7=1", "/set suppress=3", "hi", f"/save {file}")
    talker = FakeTalker()
    _, notes, session = talk(talker, f"/load {file}", "more")
    assert [message["content"] for message in talker.asked[0]] == ["Be.", "hi", "yes", "more"]
    assert session.options.top_k == 5 and session.options.logit_bias == {7: 1.0} and "2 messages from" in notes
    for broken in ("[", "[]", '{"format": "forerun-chat", "messages": [{"role": "x", "content": ""}]}'):
        file.write_text(broken)
        _, notes, session = talk(FakeTalker(), f"/load {file}")
        assert str(file) in notes and not session.turns
    file.write_text(json.dumps({"format": "forerun-chat", "messages": [], "options": {"no_such": 1}}))
    assert "there is no option 'no_such'" in talk(FakeTalker(), f"/load {file}")[1]


@pytest.mark.parametrize("options", [{"logit_bias": {"x": 1}}, {"max_tokens": "x"}, {"stop": 5}, {"suppress": 5}])
def test_a_saved_chat_with_odd_options_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    """They ended the chat in a traceback, at once or with the next message."""
    file = tmp_path / "chat"
    file.write_text(json.dumps({"format": "forerun-chat", "messages": [], "options": options}))
    _, notes, session = talk(FakeTalker(), f"/load {file}")
    assert f"{next(iter(options))} must" in notes and session.options == GenerationOptions()


def test_ctrl_c_stops_the_answer_and_keeps_what_came() -> None:
    talker = FakeTalker([ReplyPiece("so far"), KeyboardInterrupt()], [ReplyPiece("next")])
    out, notes, session = talk(talker, "hi", "go on")
    assert out == "so far (rest)\nnext\n" and "stopped · 4 tokens" in notes
    assert [turn["content"] for turn in session.turns] == ["hi", "so far (rest)", "go on", "next"]
    assert talker.closed == 2


def test_twice_leaves() -> None:
    for pressed in (KeyboardInterrupt(), EarlyPress()):
        talker = FakeTalker([pressed])
        talk(talker, "hi", KeyboardInterrupt(), "never")
    assert len(talker.asked) == 1
    _, notes, _ = talk(talker, KeyboardInterrupt(), KeyboardInterrupt(), "never")
    assert notes.count("Ctrl-C again leaves") == 1 and len(talker.asked) == 1
    talk(talker, KeyboardInterrupt(), "still here", KeyboardInterrupt(), "and here")
    assert len(talker.asked) == 3, "a line in between takes the first one back"


def test_an_answer_can_be_stopped_before_it_begins() -> None:
    """Its question stayed in the conversation without an answer: some templates refuse two in a row."""
    talker = FakeTalker([EarlyPress()], [ReplyPiece("next")])
    _, notes, session = talk(talker, "hi", "again")
    assert "stopped · Ctrl-C again leaves" in notes
    assert [[message["content"] for message in asked] for asked in talker.asked] == [["hi"], ["again"]]
    assert [turn["content"] for turn in session.turns] == ["again", "next"]


def test_a_refused_message_is_forgotten() -> None:
    talker = FakeTalker([ForerunError("the prompt is too long")])
    out, notes, session = talk(talker, "a book", "short")
    assert "forerun: the prompt is too long" in notes and out == "yes\n"
    assert [turn["content"] for turn in session.turns] == ["short", "yes"]


def test_colours_follow_the_drafters() -> None:
    talker = FakeTalker([ReplyPiece("own "), ReplyPiece("drafted ", "mtp"), ReplyPiece("found", "lookup")])
    out, notes, _ = talk(talker, "hi", terminal=True, colour=True)
    assert "own \x1b[32mdrafted \x1b[0m\x1b[36mfound\x1b[0m" in out
    assert "mtp" in notes and "lookup" in notes


def test_markdown_is_rendered_block_by_block() -> None:
    text = "# Title\n\nSome **bold** words\nthat go on.\n\n```py\na = 1\n\nb = 2\n```\n\n1. one\n\n2. two\n"
    file = io.StringIO()
    screen = MarkdownScreen(Console(file=file, force_terminal=True, width=60, height=20))
    for letter in text:
        screen.show(ReplyPiece(letter))
    screen.end()
    shown = file.getvalue()
    assert "**" not in shown.rsplit("Title", 1)[1] and "```" not in shown[-200:]
    assert "\x1b[1mbold\x1b[0m" in shown and " 2 " in shown and shown.endswith("\n")


def test_blocks_are_cut_where_later_text_changes_nothing() -> None:
    assert split_finished("one\n\ntwo") == ("one\n\n", "two")
    assert split_finished("one\n\n") == ("", "one\n\n")
    assert split_finished("```\na\n\nb\n") == ("", "```\na\n\nb\n")
    assert split_finished("```\na\n\nb\n```\n\nafter") == ("```\na\n\nb\n```\n\n", "after")
    assert split_finished("- a\n\n- b\n\n  more\n") == ("", "- a\n\n- b\n\n  more\n")
    assert split_finished("- a\n\n- b\n\nend") == ("- a\n\n- b\n\n", "end")


def test_a_model_cannot_steer_the_terminal() -> None:
    evil = "a\x1b]0;title\x07b\x9b31mc\rd\te\n"
    assert clean(evil) == "a]0;titleb31mcd\te\n"
    for flags in ({"plain": True}, {"colour": True}, {}):
        out, _, _ = talk(FakeTalker([ReplyPiece(evil)]), "hi", terminal=True, **flags)
        assert "\x1b]0;" not in out and "\x07" not in out and "\x9b" not in out
    assert talk(FakeTalker([ReplyPiece(evil)]), "hi")[0] == evil, "a pipe gets every byte"


def test_thoughts_are_not_part_of_the_answer() -> None:
    talker = FakeTalker([ReplyPiece("hm", thought=True), ReplyPiece("Yes.")])
    out, _, session = talk(talker, "hi")
    assert out == "Yes.\n" and session.turns[-1]["content"] == "Yes."
    assert "hm" in talk(FakeTalker([ReplyPiece("hm", thought=True), ReplyPiece("Yes.")]), "hi", terminal=True)[0]


def test_ctrl_d_leaves_the_shell_a_line_of_its_own() -> None:
    assert talk(FakeTalker(), terminal=True)[1] == "\n" and talk(FakeTalker())[1] == ""
    assert talk(FakeTalker(), "/exit", terminal=True)[1] == ""


def test_time_that_was_lost_is_called_so() -> None:
    totals = ChatTotals()
    totals.add(ReplySummary(tokens=3, seconds_saved=-0.25))
    assert totals.line() == "1 answer · 3 tokens · 0.2 s lost"


def test_the_closing_line() -> None:
    assert summary_line(ReplySummary(1)) == "1 token"
    assert summary_line(ReplySummary(1, seconds_saved=-0.01, seed=7), sampled=True) == "1 token · 0.0 s saved · seed 7"
    assert summary_line(ReplySummary(2, seconds_saved=-0.25, length=True, guaranteed=False)) == (
        "2 tokens · 0.2 s lost · length limit reached · same text as plain decoding: NOT GUARANTEED"
    )


def test_files_go_with_the_next_message_and_stay_in_the_conversation(tmp_path: Path) -> None:
    for name in ("cat.png", "song.wav"):
        (tmp_path / name).write_bytes(b"data")
    talker = FakeTalker([ReplyPiece("A cat")], [ReplyPiece("Yes")], [ReplyPiece("Yes")])
    lines = (f"/image {tmp_path}/cat.png", f"/audio {tmp_path}/song.wav", "What?", "Sure?", f"/save {tmp_path}/chat")
    _, notes, session = talk(talker, *lines)
    assert "cat.png goes with the next message" in notes
    shown = [
        {"type": "image", "path": f"{tmp_path}/cat.png"},
        {"type": "audio", "path": f"{tmp_path}/song.wav"},
        {"type": "text", "text": "What?"},
    ]
    assert [message["content"] for message in talker.asked[1]] == [shown, "A cat", "Sure?"]
    assert session.attached == []
    _, _, again = talk(FakeTalker(), f"/load {tmp_path}/chat", "And?")
    assert again.turns[:4] == session.turns
    assert again.turns[4]["content"] == "And?"


def test_a_file_that_is_not_there_costs_no_loading(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forerun, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    assert main(["chat", "-m", "folder", "--image", "nowhere.png"]) == 2
    assert capsys.readouterr().err == "forerun: cannot read the image nowhere.png: No such file or directory\n"


def test_files_that_cannot_be_shown_are_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "film.mp4").write_bytes(b"data")
    talker = FakeTalker()
    talker.blind_to = {"video"}
    lines = ("/image", "/image nowhere.png", f"/video {tmp_path}/film.mp4", "/set images=x", "Hello")
    _, notes, session = talk(talker, *lines)
    for said in ("/image needs the name", "cannot read the image nowhere.png", "fake cannot take video", "/image FILE"):
        assert said in notes
    assert session.turns[0]["content"] == "Hello"


@pytest.mark.parametrize("content", [7, [7], [{"type": "image"}], [{"type": "image", "path": 7}], [{"type": "x"}]])
def test_a_saved_chat_with_odd_contents_is_refused(content: Any, tmp_path: Path) -> None:
    file = tmp_path / "chat"
    file.write_text(json.dumps({"format": "forerun-chat", "messages": [{"role": "user", "content": content}]}))
    _, notes, session = talk(FakeTalker(), f"/load {file}")
    assert "every message needs a role" in notes and not session.turns
