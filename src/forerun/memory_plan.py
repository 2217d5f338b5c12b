"""The memory plan of a loaded model: weights, drafters, cache, and what the machine has left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forerun.cache.pages import PagePool
from forerun.device import free_memory
from forerun.draft.assistant import AssistantDrafter
from forerun.draft.model import ModelDrafter
from forerun.draft.mtp import MtpDrafter
from forerun.draft.protocol import Drafter
from forerun.language_model import LanguageModel


@dataclass(frozen=True, slots=True)
class PlannedDrafter:
    """One drafter: what it is, and the bytes of its weights and of its own cache."""

    name: str
    about: str
    weights: int
    cache: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes, as they were when the model had loaded."""

    weights: int
    drafters: list[PlannedDrafter]
    cache: int
    cache_tokens: int
    context: int
    state: int  # of recurrent layers, for all sequences
    left: int  # when the towers are there as well
    towers: int = 0  # for media: read when the first of them come

    @property
    def total(self) -> int:
        """All that is held, or has a place reserved."""
        drafters = sum(one.weights + one.cache for one in self.drafters)
        return self.weights + self.cache + self.state + drafters + self.towers


def memory_plan(loaded: LanguageModel) -> MemoryPlan:
    """What a loaded model holds. A lookup keeps tokens only, which is next to nothing."""
    engine, decoder = loaded.engine, loaded.engine.model
    pool, config = engine.pool, decoder.config
    state, towers = 0, 0 if loaded.media is None else loaded.media.weight_bytes
    if pool.states is not None and config.delta is not None:
        state = pool.states.bytes_per_slot(config.delta, config.recurrent_layers) * pool.states.count
    return MemoryPlan(
        weights=decoder.weight_bytes,
        drafters=list(_drafters(loaded)),
        cache=pool_bytes(pool),
        cache_tokens=pool.count * pool.page,
        context=engine.context,
        state=state,
        left=max(0, free_memory(decoder.device) - towers),
        towers=towers,
    )


def page_bytes(pool: PagePool) -> int:
    """Of one page in every layer."""
    return sum((layer.keys[0].numel() + layer.values[0].numel()) * layer.keys.element_size() for layer in pool.layers)


def pool_bytes(pool: PagePool) -> int:
    """Of all pages."""
    return pool.count * page_bytes(pool)


def _drafters(loaded: LanguageModel) -> Iterator[PlannedDrafter]:
    for name, drafter in loaded.engine.drafters.by_name.items():
        weights, cache = _held(drafter)
        yield PlannedDrafter(name, loaded.drafter_labels.get(name, ""), weights, cache)


def _held(drafter: Drafter) -> tuple[int, int]:
    """Bytes of a drafter's own weights and cache."""
    if isinstance(drafter, MtpDrafter):
        return drafter.head.weight_bytes, pool_bytes(drafter.pool)
    if isinstance(drafter, AssistantDrafter):
        return drafter.assistant.weight_bytes, 0
    if isinstance(drafter, ModelDrafter):
        return drafter.model.weight_bytes, pool_bytes(drafter.pool)
    return 0, 0
