"""The memory plan of a loaded model: weights, drafters, cache, and what the machine has left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forerun.cache.pages import PagePool, token_bytes
from forerun.device import free_memory
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
    state: int  # of recurrent layers, for all sequences and for what stays in the prefix cache
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
        state = pool.states.bytes_per_slot(config.delta, config.recurrent_layers)
        state *= pool.states.count + pool.prefix.most_states
    return MemoryPlan(
        weights=decoder.weight_bytes,
        drafters=list(_drafters(loaded)),
        cache=pool.count * pool.page * token_bytes(config.attention, decoder.dtype),
        cache_tokens=pool.count * pool.page,
        context=engine.context,
        state=state,
        left=max(0, free_memory(decoder.device) - towers),
        towers=towers,
    )


def page_bytes(pool: PagePool) -> int:
    """Of one page in every layer of the model."""
    return sum((layer.keys[0].numel() + layer.values[0].numel()) * layer.keys.element_size() for layer in pool.layers)


def _drafters(loaded: LanguageModel) -> Iterator[PlannedDrafter]:
    pool = loaded.engine.pool
    for name in loaded.engine.drafters.by_name:
        weights, cache = 0, 0
        if name in loaded.engine.drafters.rows:
            row_drafter = loaded.engine.drafters.rows[name]
            weights = row_drafter.weight_bytes
            cache = pool.count * pool.page * token_bytes(row_drafter.specs, loaded.engine.model.dtype)
        yield PlannedDrafter(name, loaded.drafter_labels.get(name, ""), weights, cache)
