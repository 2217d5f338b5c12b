"""A fleet on a Ray cluster: joining one or starting one on this machine, deploying, looking, stopping."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from forerun.errors import ForerunError
from forerun.fleet.settings import FleetPlan
from forerun.serve.settings import ServeSettings

NAME = "forerun"  # of the application
LOCAL = "local"  # Ray's word for a cluster of one's own
OBJECTS = 256 << 20  # bytes of shared memory on a machine of our own: media are all that is large
LOOK = 0.5  # seconds between two looks
PATIENCE = 60.0  # seconds for the address to answer once all replicas are there
NO_RAY = "a fleet needs Ray: pip install 'forerun[fleet]'"
NO_CLUSTER = "there is no Ray cluster here: start a fleet with forerun fleet, or name a cluster with --address"
REASON = re.compile(r"ForerunError: (.+)")


@dataclass(frozen=True, slots=True)
class Deployment:
    """One kind of process of a fleet."""

    status: str
    replicas: dict[str, int] = field(default_factory=dict)  # by their state
    message: str = ""


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """What `forerun fleet status` tells."""

    status: str
    message: str
    deployments: dict[str, Deployment]

    @property
    def running(self) -> bool:
        """Is everything there that should be?"""
        return self.status == "RUNNING"


@contextlib.contextmanager
def joined(address: str | None, start: float | None = None, quiet: bool = True) -> Generator[bool, None, None]:
    """In a cluster: that of `address` or RAY_ADDRESS, else the one on this machine; "local" is always a new one.

    Where there is none and `start` says how many processors are wanted, one begins, which ends with the block. Gives
    whether it is our own.
    """
    ray = _ray()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    quietly: dict[str, Any] = {"log_to_driver": not quiet, "configure_logging": False}
    wanted = address or os.environ.get("RAY_ADDRESS")
    own = start is not None and wanted == LOCAL
    try:
        if not own:
            ray.init(address=wanted or "auto", **quietly)
    except (ConnectionError, ValueError, RuntimeError) as error:
        if wanted is not None:
            raise ForerunError(f"there is no Ray cluster at {wanted}: {_first(error)}") from error
        if start is None:
            raise ForerunError(NO_CLUSTER) from None
        own = True
    if own:
        assert start is not None
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # else every other program on the machine comes first
        processors = max(os.cpu_count() or 1, math.ceil(start))
        ray.init(LOCAL, num_cpus=processors, object_store_memory=OBJECTS, include_dashboard=False, **quietly)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's own would end us before the cluster
    try:
        yield own
    finally:
        ray.shutdown()


def deploy(plan: FleetPlan) -> None:
    """Start it, or change the one there is replica by replica; returns when it serves. Inside `joined`."""
    from ray import serve

    from forerun.fleet.ray_serve import QUIET, application

    serving = plan.serving
    serve.start(http_options={"host": serving.host, "port": serving.port}, logging_config=QUIET)
    try:
        serve.run(application(plan), name=NAME)
    except RuntimeError as error:
        left = status()
        reasons = [one.message for one in left.deployments.values()] if left is not None else []
        found = REASON.search("\n".join([*reasons, str(error)]))
        raise ForerunError(found[1] if found else f"the fleet did not start: {_first(error)}") from error
    _answers(serving)


def _answers(serving: ServeSettings) -> None:
    """Wait until clients are served where they were told to come."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(serving.host, serving.host)
    address = f"http://{host}:{serving.port}"
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
            return
        time.sleep(LOOK)
    raise ForerunError(
        f"the fleet runs, but nothing answers at {address}: where Ray Serve was started before, it keeps its own "
        "address and port (serve shutdown ends it)"
    )


def status() -> FleetStatus | None:
    """None: there is no fleet. Inside `joined`."""
    from ray import serve

    found = serve.status().applications.get(NAME)
    if found is None:
        return None
    return FleetStatus(
        str(found.status.value),
        found.message,
        {
            name: Deployment(
                str(one.status.value),
                {str(getattr(state, "value", state)): count for state, count in one.replica_states.items()},
                one.message,
            )
            for name, one in found.deployments.items()
        },
    )


def stop() -> bool:
    """Let answers under way finish, then end it. False: there was none. Inside `joined`."""
    from ray import serve

    if status() is None:
        return False
    serve.delete(NAME)
    return True


def stay() -> None:
    """Until a signal comes, or the fleet was stopped from elsewhere; then stop it."""
    asked = threading.Event()
    before = {number: signal.signal(number, lambda *_: asked.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while not asked.wait(LOOK):
            if status() is None:
                return
        stop()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wanted_processors(plan: FleetPlan) -> float:
    """For all replicas that may be there at once."""
    return plan.fleet.cpus * (plan.fleet.max_replicas or plan.fleet.replicas)


def _ray() -> Any:
    try:
        import ray
        from ray import serve  # noqa: F401
    except ImportError as error:
        raise ForerunError(NO_RAY) from error
    return ray


def _first(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
