"""What a fleet can be told, beside the model's and the server's options; and the whole description of one."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from forerun.errors import ForerunError
from forerun.fleet.routing import Policy
from forerun.serve.settings import LogFormat, LogLevel, ServeSettings

FLEET = "Fleet"


def _about(help: str) -> dict[str, str]:
    return {"topic": FLEET, "help": help}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """How many replicas, what each of them gets, and who decides which one answers."""

    replicas: int = field(default=1, metadata=_about("Replicas of the model; with --max-replicas the fewest."))
    max_replicas: int | None = field(
        default=None, metadata=_about("Start more while requests wait, up to so many, and end them when idle.")
    )
    target_requests: int | None = field(
        default=None,
        metadata=_about("Requests under way for which a replica is enough; default: half of --max-running."),
    )
    cpus: float = field(default=1.0, metadata=_about("Processors of a replica, fractions too."))
    gpus: float | None = field(
        default=None, metadata=_about("GPUs of a replica, fractions too; default: 1 where there are any.")
    )
    routing: Policy = field(
        default="prefix",
        metadata=_about("prefix: the replica that has the beginning of the prompt; queue; round-robin."),
    )
    fronts: int = field(default=1, metadata=_about("Processes that speak HTTP."))

    def check(self) -> None:
        """Refuse what cannot be meant."""
        for name in ("replicas", "max_replicas", "target_requests", "fronts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ForerunError(f"--{name.replace('_', '-')} {value}: give a whole number from 1 up")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ForerunError(
                f"--max-replicas {self.max_replicas} is below --replicas {self.replicas}: make it larger"
            )
        if not 0 < self.cpus < 10_000:
            raise ForerunError(f"--cpus {self.cpus:g}: give a number of processors above 0")
        if self.gpus is not None and not 0 <= self.gpus < 10_000:
            raise ForerunError(f"--gpus {self.gpus:g}: give a number of GPUs, 0 for none")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """All there is to say about a fleet. Two plans that are equal need no update."""

    model: str = "smollm2"
    loading: Mapping[str, Any] = field(default_factory=dict)  # for `forerun.load`
    serving: ServeSettings = field(default_factory=ServeSettings)
    fleet: FleetSettings = field(default_factory=FleetSettings)
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"

    @property
    def key(self) -> str:
        """Replicas with the same one have the same model."""
        return repr((self.model, sorted(self.loading.items())))

    def check(self) -> None:
        """`ForerunError` for the first thing that is wrong."""
        from forerun.serve.settings_check import check_settings

        check_settings(self.serving)
        if self.serving.kv_events is not None:
            raise ForerunError("--kv-events is for forerun serve: the replicas of a fleet would share one address")
        self.fleet.check()


def plan_of(values: Mapping[str, Any]) -> FleetPlan:
    """The plan of a YAML file for `serve deploy`: names as flags have them, with `-` or `_`."""
    given = {name.replace("-", "_"): value for name, value in values.items()}
    loading = load_names()
    known = {
        "model",
        "log_level",
        "log_format",
        *loading,
        *(entry.name for kind in (ServeSettings, FleetSettings) for entry in fields(kind)),
    }
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see forerun fleet --help"
            raise ForerunError(f"a fleet has no setting {name!r}: {hint}")
    plan = FleetPlan(
        model=str(given.get("model", "smollm2")),
        loading={name: given[name] for name in loading if name in given},
        serving=ServeSettings(**_checked(ServeSettings, given)),
        fleet=FleetSettings(**_checked(FleetSettings, given)),
        **_checked(FleetPlan, {name: given[name] for name in ("log_level", "log_format") if name in given}),
    )
    plan.check()
    return plan


def _checked(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values that belong to this dataclass, each of the type that it declares."""
    from pydantic import TypeAdapter, ValidationError

    found: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        if name in given:
            value = tuple(given[name]) if isinstance(given[name], list) else given[name]
            try:
                found[name] = TypeAdapter(hint).validate_python(value, strict=True)
            except ValidationError as error:
                raise ForerunError(f"{name}: {error.errors()[0]['msg']}, not {value!r}") from None
    return found


def load_names() -> list[str]:
    """What `forerun.load` can be told of a model."""
    from forerun.loading import load_model

    return [name for name in inspect.signature(load_model).parameters if name not in ("model", "progress")]
