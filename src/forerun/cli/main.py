"""`forerun`: finds the command, runs it, and turns every way to fail into one line and an exit code."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from forerun import __version__
from forerun.cli.bench import bench
from forerun.cli.chat import chat
from forerun.cli.check import check
from forerun.cli.convert import convert
from forerun.cli.fleet import fleet_app
from forerun.cli.generate import generate
from forerun.cli.serve import serve
from forerun.cli.train_head import train_head
from forerun.errors import ForerunError

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, what a shell reports
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, a full quota, a limit on the size of files


def run() -> None:
    """The console script: `main`, and gone. Taking torch down in good order would take half a second."""
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # whoever read it is gone
            stream.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    _prepare_streams()
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except typer.Exit as finished:
        return finished.exit_code
    except TyperException as error:
        return _refuse(f"{_reason(error)} (see {_help_command(error)})")
    except ForerunError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return EXIT_BROKEN_PIPE
    except SystemExit:  # what rich makes of a broken pipe
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if isinstance(error, PermissionError) and error.filename:  # the user named it, or something above it
            return _refuse(f"{error.filename}: {error.strerror}")
        if error.errno not in NO_ROOM:
            raise
        return _refuse(f"cannot write {error.filename or 'the output'}: {error.strerror}; make room and run it again")


def build_app() -> typer.Typer:
    """The commands and their help; importing them costs milliseconds, running them imports torch."""
    app = typer.Typer(name="forerun", add_completion=False, pretty_exceptions_enable=False, help=_overview.__doc__)
    app.callback(invoke_without_command=True)(_overview)
    app.command()(generate)
    app.command()(serve)
    app.add_typer(fleet_app(), name="fleet")
    app.command()(chat)
    app.command()(check)
    app.command()(bench)
    app.command()(convert)
    app.command()(train_head)
    return app


def _run(argv: Sequence[str]) -> int:
    command = typer.main.get_command(build_app())
    # Not command.main(): it would handle interrupts and broken pipes its own way.
    with command.make_context("forerun", list(argv)) as context:
        command.invoke(context)
    sys.stdout.flush()
    return 0


def _overview(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Speculative decoding that gives exactly the text plain decoding would have given."""
    if version:
        print(f"forerun {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(EXIT_BAD_INPUT)


def _refuse(message: str) -> int:
    one_line = " ".join(message.split())
    print(f"forerun: {one_line}", file=sys.stderr)
    return EXIT_BAD_INPUT


def _reason(error: TyperException) -> str:
    reason = error.format_message().replace("Value error, ", "").rstrip(".")  # the prefix is its validator's, not ours
    variable = _variable(error)
    return reason if variable is None else f"{variable}: {reason}"


def _variable(error: TyperException) -> str | None:
    """The variable that a refused value came from."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if context is None or parameter is None:
        return None
    source = context.get_parameter_source(parameter.name)
    return str(parameter.envvar) if source is not None and source.name == "ENVIRONMENT" else None


def _help_command(error: TyperException) -> str:
    context = getattr(error, "ctx", None)  # only usage errors know which command they happened in
    return f"{context.command_path if context else 'forerun'} --help"


def _prepare_streams() -> None:
    """No stream may end an answer: closed ones become empty, and characters that a terminal cannot show become `?`.

    What is typed and is no text comes through marked, for those who read it to refuse.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - for good
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="surrogateescape" if mode == "r" else "replace")


def _drop_stdout() -> None:
    """Whoever read our output is gone: point it at nothing, or the interpreter complains when it exits."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # not a real file, nothing to redirect
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)
