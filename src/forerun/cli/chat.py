"""`forerun chat`: a conversation in the terminal, with a model in this process or with a server."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

import typer

from forerun.cli.chat_loop import ChatLoop, Read
from forerun.cli.chat_session import Session
from forerun.cli.chat_talkers import LocalTalker, Talker
from forerun.cli.flags import (
    KeepingLoadOptions,
    OptionalModelArgument,
    Quiet,
    model_option,
    output_option,
    with_flags,
)
from forerun.cli.generation_flags import check_options, with_generation_flags
from forerun.cli.terminal_progress import terminal_progress
from forerun.errors import ForerunError
from forerun.home import forerun_home
from forerun.options import GenerationOptions

HISTORY_LINES = 1000


@with_generation_flags
@with_flags("loading", KeepingLoadOptions)
def chat(
    *,
    name: OptionalModelArgument = None,
    model: Annotated[str | None, model_option("--model", "-m", help="The same, as a flag.")] = None,
    url: Annotated[str | None, model_option(help="Chat with a server, such as http://127.0.0.1:8000.")] = None,
    api_key: Annotated[str | None, model_option(envvar="FORERUN_API_KEY", help="The server's key.")] = None,
    options: GenerationOptions,
    loading: KeepingLoadOptions,
    plain: Annotated[bool, output_option("--plain", help="No markdown: the text as it comes.")] = False,
    colour: Annotated[bool, output_option("--colour", "--color", help="Colour each token by its drafter.")] = False,
    quiet: Quiet = False,
) -> None:
    """Talk to a model. /help lists the commands; without a terminal every line of stdin is a message."""
    if name is not None and model is not None and name != model:
        raise ForerunError(f"two models are named, {name!r} and --model {model!r}: give one of them")
    if options.raw:
        raise ForerunError("--raw uses no chat template, and a chat needs one: use forerun generate --raw")
    loading.check()
    check_options(options)
    wanted = name or model
    plain_options = replace(options, system=None, images=None, videos=None, audio=None)
    with contextlib.ExitStack() as ending:
        if url is not None:
            talker = _server(url, api_key, wanted, loading)
        else:
            talker = _engine(wanted or "smollm2", loading, quiet, ending)
        talker.check(options)
        session = Session(talker, plain_options, system=options.system, colour=colour)
        for kind, files in options.media.items():
            for file in files:
                session.attach(kind, file)
        _talk(session, plain=plain, quiet=quiet)


def _engine(model: str, loading: KeepingLoadOptions, quiet: bool, ending: contextlib.ExitStack) -> Talker:
    """`ending` closes the model."""
    import forerun

    progress = terminal_progress(quiet)
    loaded = ending.enter_context(forerun.load(model, progress=progress, **loading.arguments()))
    return LocalTalker(loaded, model, progress)


def _server(url: str, api_key: str | None, model: str | None, loading: KeepingLoadOptions) -> Talker:
    given = [repr(model)] if model is not None else loading.given()
    if given:
        raise ForerunError(f"--url: the server has its model already: drop {given[0]}")
    from forerun.cli.chat_remote import RemoteTalker

    return RemoteTalker(url, api_key)


def _talk(session: Session, *, plain: bool, quiet: bool) -> None:
    from rich.console import Console

    out, notes = Console(highlight=False), Console(stderr=True, highlight=False)
    watched = sys.stdin.isatty() and sys.stdout.isatty()
    if watched and not quiet:
        notes.print(f"{session.talker.name} · /help for commands", style="dim", markup=False)
    with _history() if watched else contextlib.nullcontext(_read_pipe) as read:
        loop = ChatLoop(session, read, out, notes, plain=plain, quiet=quiet)
        loop.run()
    if loop.failures and not watched:
        raise typer.Exit(2)


def _read_pipe(_: str) -> str:
    """A line of stdin, without a prompt that would end up in the output."""
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


@contextlib.contextmanager
def _history() -> Iterator[Read]:
    """`input` with the lines of earlier chats, where readline is there; they are kept for the user alone."""
    try:
        import readline
    except ImportError:  # Windows
        yield input
        return
    file = forerun_home() / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield input
    finally:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)
            readline.write_history_file(file)
