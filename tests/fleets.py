"""Fleets for tests: a Ray cluster of this process, replicas of tiny models, and what they may be compared with."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serve_fakes import call, until

from forerun.fleet import cluster
from forerun.fleet.ray_serve import EngineReplica, application
from forerun.fleet.settings import FleetPlan, FleetSettings
from forerun.serve.settings import ServeSettings

LOADING = {"device": "cpu", "dtype": "float32", "quantize": "none", "max_context": 1500}
STEP = 0.1  # seconds that a round of a sleeping engine takes at least
ROOT = Path(__file__).parent.parent


class SleepingReplica(EngineReplica):
    """Its rounds take their time and no processor, so that many of them fit a small machine."""

    async def __init__(self, plan: FleetPlan) -> None:
        await super().__init__(plan)
        model = self._replica.engine.model
        assert model is not None
        step = model.engine.step

        def slowly() -> None:
            time.sleep(STEP)
            step()

        model.engine.step = slowly  # type: ignore[method-assign]


@contextmanager
def ray_cluster() -> Iterator[int]:
    """One of this process, small and quiet; gives the port that its HTTP side listens on."""
    import ray
    from ray import serve

    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
    }
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    ray.init(
        num_cpus=16,
        object_store_memory=80 << 20,
        include_dashboard=False,
        configure_logging=False,
        log_to_driver="FLEET_LOGS" in os.environ,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "WARNING"})
        yield port
    finally:
        serve.shutdown()
        ray.shutdown()


def plan(folder: Path, port: int, replicas: int = 2, fleet: dict[str, Any] | None = None, **serving: Any) -> FleetPlan:
    return FleetPlan(
        model=str(folder),
        loading=LOADING,
        serving=ServeSettings(port=port, drain_timeout=20.0, **serving),
        fleet=FleetSettings(replicas=replicas, cpus=1.0, gpus=0.0, **(fleet or {})),
    )


def run(what: FleetPlan, replica: type = EngineReplica) -> str:
    """Deploy it, or change what there is; gives the address once it is ready."""
    from ray import serve

    serve.run(application(what, replica), name=cluster.NAME)
    address = f"http://127.0.0.1:{what.serving.port}"
    until(lambda: call(address, "/health").status == 200, 30)
    return address


def running(count: int) -> bool:
    """Are so many replicas there, and is nothing else going on?"""
    found = cluster.status()
    return found is not None and found.running and found.deployments["engine"].replicas == {"RUNNING": count}


def replica_processes() -> list[int]:
    """Of the cluster of this process: Ray's daemon is its child, and replicas are the daemon's."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                title, parent = (folder / "cmdline").read_bytes(), _parent(folder.name)
                if title.startswith(b"ray::ServeReplica:forerun:engine") and _parent(str(parent)) == os.getpid():
                    found.append(int(folder.name))
            except OSError:
                continue  # it has ended meanwhile
    return found


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)


def _parent(process: str) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


if sys.platform != "linux":
    raise RuntimeError("processes are found in /proc")
