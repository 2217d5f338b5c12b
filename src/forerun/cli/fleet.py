"""`forerun fleet`: replicas of a model behind one address; `forerun fleet status` and `forerun fleet stop`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Annotated

import typer
from typer.core import TyperGroup

from forerun.cli.flags import (
    AsJson,
    LoadOptions,
    ModelName,
    OptionalModelArgument,
    Quiet,
    output_option,
    panel,
    with_flags,
)
from forerun.cli.serve_screen import print_address
from forerun.cli.sources import Sources, named_model, with_sources
from forerun.errors import ForerunError
from forerun.fleet.settings import FLEET, FleetPlan, FleetSettings
from forerun.serve.settings import LogFormat, LogLevel, ServeSettings
from forerun.tables import output_console, print_table, unnamed_columns

Address = Annotated[
    str | None,
    panel(FLEET)(
        "--address", help="A Ray cluster; default: RAY_ADDRESS, or the one on this machine; local: a new one."
    ),
]


class DeployByDefault(TyperGroup):
    """`forerun fleet MODEL` is `forerun fleet deploy MODEL`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Anything but a command or --help belongs to `deploy`."""
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["deploy", *args]
        return super().parse_args(ctx, args)


def fleet_app() -> typer.Typer:
    """The group and its commands."""
    app = typer.Typer(cls=DeployByDefault, help="Replicas of a model on a Ray cluster, behind one address.")
    app.command()(deploy)
    app.command()(status)
    app.command()(stop)
    return app


@with_sources
@with_flags("fleet", FleetSettings)
@with_flags("settings", ServeSettings)
@with_flags("loading", LoadOptions)
def deploy(
    *,
    name: OptionalModelArgument = None,
    model: ModelName = "smollm2",
    fleet: FleetSettings,
    settings: ServeSettings,
    loading: LoadOptions,
    address: Address = None,
    log_level: Annotated[LogLevel, output_option(help="How much to tell.")] = "info",
    log_format: Annotated[LogFormat, output_option(help="Lines for people, or JSON for programs.")] = "text",
    quiet: Quiet = False,
    sources: Sources,
) -> None:
    """Serve a model with several replicas, or change a fleet replica by replica (what runs finishes).

    On a Ray cluster the fleet stays when this command ends. Where there is none, one begins on this machine and ends
    with this command.
    """
    from forerun.fleet import cluster
    from forerun.serve.run import model_names
    from forerun.serve.settings_check import free_port

    model, _ = named_model(name, model, sources)
    loading.check()
    plan = FleetPlan(
        model=model,
        loading=loading.arguments(),
        serving=settings,
        fleet=fleet,
        log_level=log_level,
        log_format=log_format,
    )
    plan.check()
    if settings.port == 0:
        plan = replace(plan, serving=replace(settings, port=free_port(settings.host, 0)))
    with cluster.joined(address, start=cluster.wanted_processors(plan), quiet=quiet) as own:
        cluster.deploy(plan)
        if not quiet:
            print_address(plan.serving, model_names(model, settings)[0])
            print("ctrl-c ends it" if own else "it stays until: forerun fleet stop", flush=True)
        if own:
            cluster.stay()


def status(address: Address = None, as_json: AsJson = False) -> None:
    """What runs. The exit code is 0 when everything does."""
    from forerun.fleet import cluster

    with cluster.joined(address):
        found = cluster.status()
    if found is None:
        raise ForerunError("no fleet runs on this cluster: start one with forerun fleet")
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        table = unnamed_columns(3, f"fleet: {found.status.lower()}")
        for kind, one in found.deployments.items():
            counts = ", ".join(f"{count} {state.lower()}" for state, count in one.replicas.items())
            table.add_row(kind, counts, one.message if one.status != "HEALTHY" else "")
        print_table(table, output_console())
    if not found.running:
        raise typer.Exit(1)


def stop(address: Address = None) -> None:
    """End the fleet when the answers under way are finished."""
    from forerun.fleet import cluster

    with cluster.joined(address):
        if not cluster.stop():
            raise ForerunError("no fleet runs on this cluster")
    print("stopped")
