"""forerun's choice of a replica as Ray Serve asks for it: a `RequestRouter` of its public interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from forerun.fleet.routing import ByPrefix, CacheReport, Chooser, Policy, Route, make_chooser

NEXT = 4  # replicas that are asked when the chosen one is full
NOWHERE = Route()


class FleetRouter(RequestRouter):  # type: ignore[misc]  # Ray has no annotations that mypy reads
    """Calls with a `route` go where the chooser says, all others to the shorter of two queues."""

    def initialize_state(self, policy: Policy = "prefix") -> None:
        """`policy`: see `make_chooser`."""
        self._chooser: Chooser[str] = make_chooser(policy)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The chosen one first, then some others."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if not replicas:
            return []
        route = _route(pending_request)
        # While a fleet changes to another model, some have the old one and some the new one.
        own = {name: one for name, one in replicas.items() if _model(one) in (None, route.model)}
        replicas = own if route.model and own else replicas
        queues = {name: self._queue(replica) for name, replica in replicas.items()}
        chosen = self._chooser.choose(route, queues)
        others = sorted((name for name in replicas if name != chosen), key=lambda name: queues[name] or 0)
        return [[replicas[chosen]], [replicas[name] for name in others[:NEXT]]]

    def _queue(self, replica: RunningReplica) -> int | None:
        """As far as this front knows: what it sent there and what that replica said lately."""
        known: int | None = self.replica_queue_len_cache.get(replica.replica_id)
        return replica.routing_stats.get("queue") if known is None else known

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:  # noqa: ARG002
        """It has gone there."""
        self._chooser.sent(_route(pending_request), replica_id.unique_id)

    def update_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        """Some came or went, or said how they are."""
        super().update_replicas(replicas)
        if isinstance(self._chooser, ByPrefix):
            prefixes = self._chooser.prefixes
            prefixes.keep(replica.replica_id.unique_id for replica in replicas)
            for replica in replicas:
                report = replica.routing_stats.get("cache")
                if report is not None:
                    prefixes.reported(replica.replica_id.unique_id, CacheReport(*report))


def _model(replica: RunningReplica) -> str | None:
    """What it has; None: it has not said so yet."""
    found: str | None = replica.routing_stats.get("model")
    return found


def _route(pending: PendingRequest | None) -> Route:
    found = NOWHERE if pending is None else pending.kwargs.get("route", NOWHERE)
    return found if isinstance(found, Route) else NOWHERE
