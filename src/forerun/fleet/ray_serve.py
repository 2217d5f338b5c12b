"""A fleet as an application of Ray Serve: engine replicas, and fronts that speak HTTP and call them.

`build` makes it of the arguments in a YAML file: `import_path: forerun.fleet.ray_serve:build`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from forerun.errors import ForerunError
from forerun.fleet.client import ReplicaLost
from forerun.fleet.front import Front
from forerun.fleet.replica import About, Replica
from forerun.fleet.routing import Route
from forerun.fleet.settings import FleetPlan, FleetSettings, plan_of
from forerun.fleet.wire import Item
from forerun.media.parts import MediaPart, MediaPrompt
from forerun.serve.errors import try_later
from forerun.serve.log_lines import set_up_log
from forerun.serve.readings import Readings
from forerun.serve.run import model_names

log = logging.getLogger("forerun")

ROUTER = "forerun.fleet.ray_router:FleetRouter"
HEALTH = {"health_check_period_s": 5.0, "health_check_timeout_s": 30.0}
QUIET = {"log_level": "WARNING", "enable_access_log": False}  # of Ray: forerun's own lines come through
PATIENCE = 2.0  # seconds for a replica to say how it is
MEDIA_PATIENCE = 600.0  # seconds to decode and encode a film
PATIENCE_UP = 5.0  # seconds of more requests than that before another replica starts
STARTS = 2  # times that a replica may fail to load before the fleet counts as failed
ROUND_TRIPS = 100_000  # requests of a front at once: its own limits come before Ray's


class EngineReplica:
    """What runs in each replica's process."""

    async def __init__(self, plan: FleetPlan) -> None:  # type: ignore[misc]  # Ray awaits it
        import forerun

        set_up_log(plan.log_level, plan.log_format)
        self._key = plan.key
        self._replica = Replica(plan.serving)
        await self._replica.load(lambda: forerun.load(plan.model, **plan.loading))

    async def answer(self, data: bytes, fingerprint: str, *, route: Route) -> AsyncGenerator[Item, None]:  # noqa: ARG002
        """See `Replica.answer`; `route` has done its work."""
        async for item in self._replica.answer(data, fingerprint):
            yield item

    def about(self, key: str) -> About | None:
        """The model, for those whose plan has the same one."""
        return self._replica.about if key == self._key else None

    def readings(self) -> Readings:
        """How it is."""
        return self._replica.readings()

    async def read_media(self, ids: Sequence[int], parts: Sequence[MediaPart]) -> MediaPrompt | ForerunError:
        """See `Replica`."""
        return await self._replica.read_media(ids, parts)

    async def count_media(self, ids: Sequence[int], parts: Sequence[MediaPart]) -> int | ForerunError:
        """See `Replica`."""
        return await self._replica.count_media(ids, parts)

    def record_routing_stats(self) -> dict[str, Any]:
        """For routers: how it is, whose work it can do, and what its cache has. Ray's own processes unpack it."""
        state, report = self._replica.readings().state, self._replica.diary.report()
        return {
            "queue": state.running + state.waiting,
            "model": self._replica.about.fingerprint,
            "cache": (report.life, report.number, report.changes, report.whole),  # they may not have our classes
        }

    def check_health(self) -> None:
        """Ray replaces a replica that fails here."""
        self._replica.check()

    async def __del__(self) -> None:
        await self._replica.close()


class HttpFront:
    """What runs in each front's process. Ray calls `__serve_build_asgi_app__` once `__init__` is done.

    That is when a replica has the model: until then Ray keeps the front that this one comes for.
    """

    async def __init__(self, plan: FleetPlan, engines: DeploymentHandle[Any]) -> None:  # type: ignore[misc]
        set_up_log(plan.log_level, plan.log_format)
        name, aliases = model_names(plan.model, plan.serving)
        self._front = Front(RayReplicas(engines, plan.key), plan.serving, name, aliases)
        self._watching = asyncio.get_running_loop().create_task(self._front.watch())
        await self._front.there.wait()

    def __serve_build_asgi_app__(self) -> Any:
        return self._front.app

    async def __del__(self) -> None:
        self._watching.cancel()
        await self._front.engine.close()


class RayReplicas:
    """`WatchedReplicas` behind a handle of Ray Serve."""

    def __init__(self, engines: DeploymentHandle[Any], key: str) -> None:
        """`key`: of the plan; during an update some replicas may have another model."""
        self._engines, self._key = engines, key
        self._streams = engines.options(stream=True)

    async def answer(self, data: bytes, fingerprint: str, route: Route) -> AsyncGenerator[Item, None]:
        """See `Replicas`."""
        items = self._streams.answer.remote(data, fingerprint, route=route)
        try:
            async for item in items:
                yield item
        except BackPressureError as error:
            raise try_later(429, "too many requests are waiting already: try again later", "queue_full") from error
        except (RayError, RayServeException) as error:
            raise _lost(error) from error
        finally:
            items.cancel()

    async def about(self) -> About:
        """See `WatchedReplicas`."""
        try:
            about: About | None = await self._engines.about.remote(self._key)
        except (RayError, RayServeException) as error:
            raise _lost(error) from error
        if about is None:
            raise ReplicaLost("it has another model: an update is under way")
        return about

    async def readings(self) -> Sequence[Readings]:
        """See `WatchedReplicas`."""
        try:
            found = await self._engines.broadcast("readings").results_async(timeout_s=PATIENCE, return_exceptions=True)
        except TimeoutError as error:
            raise ReplicaLost("a replica did not say in time how it is") from error
        return [one for one in found if isinstance(one, Readings)]

    def read_media(self, ids: Sequence[int], parts: Sequence[MediaPart]) -> MediaPrompt | ForerunError:
        """See `WatchedReplicas`."""
        found: MediaPrompt | ForerunError = self._waited("read_media", ids, parts)
        return found

    def count_media(self, ids: Sequence[int], parts: Sequence[MediaPart]) -> int | ForerunError:
        """See `WatchedReplicas`."""
        found: int | ForerunError = self._waited("count_media", ids, parts)
        return found

    def _waited(self, method: str, *given: Any) -> Any:
        try:
            return getattr(self._engines, method).remote(*given).result(timeout_s=MEDIA_PATIENCE)
        except (RayError, RayServeException) as error:
            raise _lost(error) from error


def _lost(error: Exception) -> Exception:
    """What a replica's own code raised is no loss of the replica."""
    return error if isinstance(error, RayTaskError) else ReplicaLost(f"{type(error).__name__}")


def application(plan: FleetPlan, replica: type = EngineReplica) -> Application:
    """For `serve.run`. An application whose plan changed is updated replica by replica; `replica`: a test's own."""
    fleet, serving = plan.fleet, plan.serving
    gpus = (1.0 if _has_gpus(plan) else 0.0) if fleet.gpus is None else fleet.gpus
    scaling: dict[str, Any] = {"num_replicas": fleet.replicas}
    if fleet.max_replicas is not None:
        target = fleet.target_requests or max(1, serving.max_running // 2)
        scaling = {
            "autoscaling_config": {
                "min_replicas": fleet.replicas,
                "max_replicas": fleet.max_replicas,
                "target_ongoing_requests": target,
                "upscale_delay_s": PATIENCE_UP,
            }
        }
    engines = serve.deployment(replica).options(
        name="engine",
        ray_actor_options={"num_cpus": fleet.cpus, "num_gpus": gpus},
        max_ongoing_requests=2 * serving.max_running,  # as many wait there: no engine waits for the way to it
        max_queued_requests=serving.max_queue,
        max_constructor_retry_count=STARTS,
        graceful_shutdown_timeout_s=serving.drain_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER,
            request_router_kwargs={"policy": fleet.routing},
            request_routing_stats_period_s=1.0,
            max_backoff_s=0.2,
        ),
        logging_config=QUIET,
        **HEALTH,
        **scaling,
    )
    fronts = serve.deployment(serve.ingress()(HttpFront)).options(
        name="front",
        num_replicas=fleet.fronts,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=ROUND_TRIPS,
        graceful_shutdown_timeout_s=serving.drain_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config=QUIET,
        **HEALTH,
    )
    each = replace(plan, fleet=FleetSettings())  # another number of replicas is no reason to start those anew
    return fronts.bind(each, engines.bind(each))


def build(args: dict[str, Any]) -> Application:
    """For `serve deploy` and KubeRay. The key may come as FORERUN_API_KEY: others read the file."""
    key = os.environ.get("FORERUN_API_KEY")
    return application(plan_of(args if key is None else {"api_key": key, **args}))


def _has_gpus(plan: FleetPlan) -> bool:
    return plan.loading.get("device", "auto") != "cpu" and bool(ray.cluster_resources().get("GPU", 0))
