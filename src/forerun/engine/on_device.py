"""What an engine on a GPU has beside the general one: passes and whole rounds that are replayed from graphs."""

from __future__ import annotations

from forerun.cache.pages import PagePool
from forerun.draft.protocol import Drafter
from forerun.engine.device_round import DeviceRounds
from forerun.engine.graphs import GraphedTarget, Graphs
from forerun.engine.request import MAX_DEPTH
from forerun.models.layers.decoder import Decoder


def graphed_target(decoder: Decoder, pool: PagePool, context: int) -> GraphedTarget:
    """Decode passes as graphs; tables of angles are filled now, because a graph cannot make them grow."""
    rows = context + 2 * (MAX_DEPTH + 1)
    decoder.rope.reserve(rows)
    return GraphedTarget(decoder, pool, Graphs(pool.device), pool.pages_for(rows))


def device_rounds(target: GraphedTarget, drafters: dict[str, Drafter], vocab: int) -> DeviceRounds:
    """Whole rounds as graphs, drafts of the head included."""
    pages = target.tables[0].shape[1]
    return DeviceRounds(target.decoder, target.pool, target.graphs, target.counts, drafters, vocab, pages)
