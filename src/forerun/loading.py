"""From a name to a model that is ready to run: find, read, check, pack, probe."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from forerun.cache.pages import PagePool, Parts, token_bytes
from forerun.cache.prefix_file import PrefixFile, check_place
from forerun.cgroups import processors
from forerun.device import (
    CPU_CACHE_SHARE,
    GPU_CACHE_SHARE,
    Machine,
    free_memory,
    out_of_memory,
    plan_machine,
    running_memory,
)
from forerun.draft.arms import MAX_DEPTH, MTP
from forerun.draft.assistant import AssistantDrafter
from forerun.draft.assistant_loading import find_assistant
from forerun.draft.head import build_head
from forerun.draft.lookup import Lookup
from forerun.draft.model import ModelDrafter
from forerun.draft.mtp import MtpDrafter
from forerun.draft.protocol import Drafter, RowDrafter
from forerun.engine.captures import working_memory
from forerun.engine.engine import CHUNK, SLOWDOWN, Engine
from forerun.engine.probe import ProbeResult, probe
from forerun.errors import ForerunError
from forerun.home import expanded, forerun_home
from forerun.language_model import LanguageModel
from forerun.media.loading import media_reader, media_weights
from forerun.memory import available_memory, return_freed_memory, wanted_memory
from forerun.models.families import build
from forerun.models.gemma4_assistant import POSITIONS
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.mtp import MtpHead
from forerun.models.layers.rows import Target
from forerun.openmp import limit_workers, release_workers
from forerun.options import whole_number
from forerun.policy.cost_file import CostFile, machine_facts
from forerun.policy.costs import CostTable
from forerun.prefix_facts import prefix_facts
from forerun.progress import NullProgress, Progress
from forerun.tables import readable_bytes
from forerun.weights.checkpoint import Checkpoint, open_checkpoint
from forerun.weights.find import BUILT_IN_SAMPLING, find
from forerun.weights.fingerprint import contents_digest, fingerprint
from forerun.weights.generation_config import generation_defaults
from forerun.weights.heads import find_head
from forerun.weights.tokenizer import load_tokenizer, stop_token_ids

PAGE = 64  # tokens per page
SEQUENCES = 8  # full contexts the cache of a CPU holds when memory allows and nothing else is asked for
PROBED_WIDTHS = [2, 3, 4, 5, 8, 12, 16]
DEVICE_CHUNK = 2048  # prompt tokens of a pass on a GPU: launching it takes the host as long as many tokens take the GPU
PROBED_PAGES = 4  # the probe runs two sequences, one of them over the border of a page


def load_model(
    model: str | Path = "smollm2",
    *,
    device: str = "auto",
    dtype: str = "auto",
    quantize: str = "auto",
    max_context: int | None = None,
    memory: str | float | None = None,
    draft_model: str | Path | None = None,
    head: str | Path | None = "auto",
    assistant_position: str = "n-1",
    prefix_cache: bool = True,
    slowdown: float = SLOWDOWN,
    cache: str | Path | None = None,
    progress: Progress | None = None,
) -> LanguageModel:
    """See `forerun.load`."""
    began = time.perf_counter()
    progress = progress or NullProgress()
    model = name_or_path("the model", model)
    draft_model = None if draft_model is None else name_or_path("draft_model", draft_model)
    head = None if head is None else name_or_path("head", head)
    place = None if cache is None else check_place(expanded(name_or_path("cache", cache)))
    if place is not None and not prefix_cache:
        raise ForerunError("cache names a file to keep the prefix cache in, and prefix_cache is off: drop one of them")
    max_context, room = whole_number("max_context", max_context), wanted_memory(memory)
    if not isinstance(slowdown, int | float) or not 1 < slowdown < math.inf:
        raise ForerunError(f"slowdown must be a number above 1, not {slowdown!r}")
    if assistant_position not in POSITIONS:
        raise ForerunError(f"the assistant's position must be {' or '.join(POSITIONS)}, not {assistant_position!r}")
    machine = plan_machine(device, dtype, quantize)
    if machine.device.type == "cpu":
        limit_workers(processors())
    folder = find(model, progress=progress)
    with ThreadPoolExecutor(2) as beside:  # where transformers is imported, that takes as long as packing and probing
        reading = beside.submit(load_tokenizer, folder)
        hashing = None if place is None else beside.submit(contents_digest, folder)
        checkpoint = open_checkpoint(folder)
        with enough_memory(checkpoint, machine):
            decoder = build(checkpoint, machine.kernels, machine.device, machine.dtype, progress)
        context = context_size(decoder, max_context)
        tokenizer = reading.result()
    vocab = min(len(tokenizer), decoder.config.vocab)
    file = expanded(model)
    drafting = None
    with running_memory():  # all weights come before the cache, which takes what they leave
        named = None if draft_model is None else find(draft_model, progress=progress)
        assistant = find_assistant(named, folder, decoder, assistant_position)
        if named is not None and assistant.assistant is None:
            drafting = load_draft_model(named, tokenizer, machine, progress)
        heads = load_head(head, checkpoint, decoder, vocab)
    towers = media_weights(checkpoint, decoder.dtype)
    drafting_rows: dict[str, RowDrafter] = {}
    labels = {"lookup": "finds drafts in the text so far"}
    if assistant.assistant is not None:
        drafting_rows["assistant"] = AssistantDrafter(assistant.assistant, vocab)
        labels["assistant"] = f"the assistant {assistant.path}"
    elif drafting is not None:
        drafting_rows["model"] = ModelDrafter(drafting, vocab)
        labels["model"] = f"the draft model {draft_model}"
    if heads.head is not None:
        decoder.taps = heads.head.taps
        drafting_rows["mtp"] = MtpDrafter(heads.head, vocab)
        labels["mtp"] = heads.label
    drafters: dict[str, Drafter] = {"lookup": Lookup(), **drafting_rows}
    if machine.graphs:  # what is captured looks angles up and cannot make their tables grow
        ropes = [decoder.rope, *([] if heads.head is None else [heads.head.rope])]
        for rope in [*ropes, *([] if drafting is None else [drafting.rope])]:
            rope.reserve(context + 2 * (MAX_DEPTH + 1))
    with enough_memory(checkpoint, machine):
        parts = {name: drafter.specs for name, drafter in drafting_rows.items()}
        pool = make_pool(decoder, context, machine, towers, room, parts, prefix_cache)
        target = host_target(decoder, pool)
        result = run_probe(decoder, pool, progress, target)
    prefix_file = None
    if place is not None and hashing is not None:
        sources = {"mtp": heads.path, "assistant": assistant.path, "model": named}
        owned = {name: contents_digest(path) if (path := sources[name]) else "" for name in drafting_rows}
        about = prefix_facts(machine, pool, hashing.result(), owned | {"position": assistant_position})
        prefix_file = PrefixFile(place, about)
    facts = {"model": fingerprint(checkpoint), "head": str(head), "draft model": str(draft_model)}
    cost_file = CostFile(forerun_home() / "costs", machine_facts(machine.device, machine.describe()) | facts)
    costs = CostTable(cost_file.read())
    file = expanded(model)
    engine = Engine(
        decoder,
        pool,
        drafters,
        vocab=vocab,
        context=context,
        max_width=result.widest,
        chunk=DEVICE_CHUNK if machine.graphs else CHUNK,
        unavailable=({} if heads.missing is None else {"mtp": heads.missing}) | assistant.missing,
        costs=costs,
        target=target,
        prefix_cache=prefix_cache,
        slowdown=slowdown,
    )
    if prefix_file is not None:
        prefix_file.read(pool)
    release_workers()  # answers may be made on another thread
    return_freed_memory()
    return LanguageModel(
        engine=engine,
        tokenizer=tokenizer,
        stop_ids=stop_token_ids(folder, tokenizer),
        machine=machine,
        probe=result,
        load_seconds=time.perf_counter() - began,
        name=os.path.basename(os.path.abspath(file)) if file.exists() else model,
        generation_defaults=BUILT_IN_SAMPLING.get(model, {}) | generation_defaults(folder),
        head_warnings=heads.warnings + assistant.warnings,
        notes=checkpoint.notes,
        cost_file=cost_file,
        prefix_file=prefix_file,
        drafter_labels=labels,
        media=media_reader(checkpoint, tokenizer, machine.device, decoder.dtype, engine.owner, context=engine.longest),
    )


def name_or_path(what: str, given: object) -> str:
    """As text: what was typed, or a path of pathlib's."""
    if not given or not isinstance(given, str | Path):
        raise ForerunError(f"{what} must be a name or a path, not {given!r}")
    return str(given)


def context_size(decoder: Decoder, wanted: int | None) -> int:
    """Tokens of context: the model's own, or fewer when asked for."""
    if wanted is None:
        return decoder.config.context
    if not 2 <= wanted <= decoder.config.context:
        raise ForerunError(f"max context must be 2 to {decoder.config.context} for this model, not {wanted}")
    return wanted


def make_pool(
    decoder: Decoder,
    context: int,
    machine: Machine,
    towers: int,
    wanted: int | float | None,
    parts: Parts,
    prefix_cache: bool = True,
) -> PagePool:
    """Pages for as many tokens as `wanted` memory holds, in bytes or as a share of what is free.

    By default a GPU gives all but a tenth: it has nothing else to do. A CPU gives a quarter at most, and no more than
    several full contexts take. `parts`: the layers of drafters, which the memory is for too.
    `towers`: bytes of those that media will ask for. Up to half of the memory they are not counted as free, nor is what
    passes want; where they need more, requests with media may find too little, but all others have their pages.
    """
    gpu, tokens = machine.device.type == "cuda", None
    if gpu:
        torch.cuda.empty_cache()  # what packing weights has left with torch is free as well
    free = free_memory(machine.device)
    later = towers + (working_memory(decoder, DEVICE_CHUNK) if gpu else 0)
    if wanted is None:
        wanted = GPU_CACHE_SHARE if gpu else CPU_CACHE_SHARE
        tokens = None if gpu else max(SEQUENCES * (context + MAX_DEPTH), PROBED_PAGES * PAGE)
    memory = int(max(free - later, free // 2) * wanted) if isinstance(wanted, float) else wanted
    if memory > free and (gpu or available_memory() is not None):  # else it is a guess
        raise ForerunError(
            f"the cache cannot have {readable_bytes(memory)}: {readable_bytes(free)} are free; give it less memory"
        )
    each = token_bytes([*decoder.config.attention, *chain.from_iterable(parts.values())], decoder.dtype)
    where = decoder.dtype, decoder.device, machine.graphs
    pool = PagePool.within(decoder.config, tokens, PAGE, memory, *where, parts, prefix_cache)
    if pool is None or pool.count < PROBED_PAGES:
        raise ForerunError(
            f"{readable_bytes(memory)} are too little for the key/value cache, where {PAGE} tokens take "
            f"{readable_bytes(PAGE * each)}: give it more memory (--memory), close programs or use a smaller model"
        )
    return pool


def load_draft_model(folder: Path, tokenizer: Any, machine: Machine, progress: Progress) -> Decoder:
    """A draft model must speak in the same tokens as the target."""
    if load_tokenizer(folder).get_vocab() != tokenizer.get_vocab():
        raise ForerunError(f"the draft model {folder} has another tokenizer: use one from the same family as the model")
    return build(open_checkpoint(folder), machine.kernels, machine.device, machine.dtype, progress)


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """An MTP head, or why there is none; and what a user who lets forerun choose should know."""

    head: MtpHead | None
    missing: str | None = None
    warnings: list[str] = field(default_factory=list)
    label: str = "the model's own MTP head"
    path: Path | None = None  # of a head that is not the model's own


def load_head(wish: str | None, checkpoint: Checkpoint, decoder: Decoder, vocab: int) -> LoadedHead:
    """The head in the folder `wish`; for "auto" the model's own or a packaged one. A broken one is reported."""
    if wish is None:
        return LoadedHead(None, "the model was loaded without a head (head=None)")
    folder = None if wish == "auto" else expanded(wish)
    if folder is not None and not folder.is_dir():
        raise ForerunError(f"the MTP head {folder} is not a folder")
    try:
        native = decoder.native_head() if folder is None else None
        if native is not None:
            return LoadedHead(native)
        found = find_head(checkpoint, folder)
        if found is None:
            return LoadedHead(None, f"{checkpoint.path} has no MTP head, and none of forerun's own fits: {MTP.hint}")
        warnings = [] if found.warning is None else [found.warning]
        label = f"the MTP head {found.folder.path.name}{' of forerun' if folder is None else ''}"
        return LoadedHead(build_head(found.folder, decoder, vocab), None, warnings, label, found.folder.path)
    except ForerunError as error:
        return LoadedHead(None, str(error), [f"no MTP drafts: {error}"])


def run_probe(decoder: Decoder, pool: PagePool, progress: Progress, target: Target) -> ProbeResult:
    """The exactness probe, through the code that will serve."""
    with progress.task("checking exactness", None), torch.inference_mode():
        return probe(decoder, pool, PROBED_WIDTHS, target)


def host_target(decoder: Decoder, pool: PagePool) -> Target:
    """What runs passes on the host; on other devices the decoder itself."""
    if decoder.device.type != "cpu":
        return decoder
    from forerun.models.recorded import target_of  # needs llvmlite, which a machine with a GPU may lack

    return target_of(decoder, pool.layers, len(pool.groups))


@contextmanager
def enough_memory(checkpoint: Checkpoint, machine: Machine) -> Iterator[None]:
    """Out of memory becomes a line that says what would fit."""
    free = free_memory(machine.device)
    try:
        yield
    except Exception as error:
        if not out_of_memory(error):
            raise
        needed = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names()) * machine.dtype.itemsize
        place, cpu = ("the machine", "") if machine.device.type == "cpu" else ("the GPU", ", or use --device cpu")
        raise ForerunError(
            f"{checkpoint.path} needs about {needed / 2**30:.1f} GiB for its weights and {place} has "
            f"{free / 2**30:.1f} GiB free: free some, use a smaller model or max context{cpu}"
        ) from error
