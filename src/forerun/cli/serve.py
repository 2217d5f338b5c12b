"""`forerun serve`: settings from flags, variables and a file; what they came to; the memory plan; then the server."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from forerun.cli.flags import (
    KeepingLoadOptions,
    ModelName,
    OptionalModelArgument,
    Quiet,
    model_option,
    output_option,
    with_flags,
)
from forerun.cli.serve_screen import print_address, print_plan, print_settings
from forerun.cli.sources import Sources, named_model, with_sources
from forerun.cli.terminal_progress import terminal_progress
from forerun.errors import ForerunError
from forerun.serve.settings import LogFormat, LogLevel, ServeSettings

if TYPE_CHECKING:
    from forerun.language_model import LanguageModel


@with_sources
@with_flags("settings", ServeSettings)
@with_flags("loading", KeepingLoadOptions)
def serve(
    *,
    name: OptionalModelArgument = None,
    model: ModelName = "smollm2",
    settings: ServeSettings,
    loading: KeepingLoadOptions,
    log_level: Annotated[LogLevel, output_option(help="How much to tell.")] = "info",
    log_format: Annotated[LogFormat, output_option(help="Lines for people, or JSON for programs.")] = "text",
    dry_run: Annotated[
        bool, model_option("--dry-run", help="Load the model, print settings and memory plan, end.")
    ] = False,
    quiet: Quiet = False,
    sources: Sources,
) -> None:
    """Serve a model to OpenAI, Responses and Anthropic clients, with a web page.

    Every flag is also a variable, FORERUN_ and its name (FORERUN_MAX_QUEUE=9), and a key of the TOML file of --config.
    The command line wins over variables, variables over the file.
    """
    model, sources = named_model(name, model, sources)
    loading.check()

    from forerun.serve.log_lines import set_up_log
    from forerun.serve.settings_check import check_settings, free_port

    check_settings(settings)
    if settings.kv_events is not None and not loading.prefix_cache:
        raise ForerunError("--kv-events has nothing to tell without a prefix cache: leave out --no-prefix-cache")
    if not quiet or dry_run:
        own = {"model": model, "log_level": log_level, "log_format": log_format, "quiet": quiet}
        print_settings(settings, own | loading.arguments(), sources)
    if dry_run:
        print_plan(_load(model, loading, quiet))
        return
    settings = replace(settings, port=free_port(settings.host, settings.port))
    set_up_log(log_level, log_format)
    if log_level == "info":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # its greeting says what we have printed
    _start(model, loading, settings, quiet)


def _start(model: str, loading: KeepingLoadOptions, settings: ServeSettings, quiet: bool) -> None:
    from forerun.serve.run import model_names, run_server

    def load() -> LanguageModel:
        loaded = _load(model, loading, quiet)
        if not quiet:
            print_plan(loaded)
            print_address(settings, model_names(model, settings)[0])
        return loaded

    run_server(load, settings, model)


def _load(model: str, loading: KeepingLoadOptions, quiet: bool) -> LanguageModel:
    import forerun

    return forerun.load(model, progress=terminal_progress(quiet), **loading.arguments())
