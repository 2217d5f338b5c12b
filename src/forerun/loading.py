"""From a name to a model that is ready to run: find, read, check, pack, probe."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from forerun.cache.pages import PagePool
from forerun.device import CACHE_SHARE, Machine, free_memory, plan_machine
from forerun.draft.lookup import Lookup
from forerun.draft.model import ModelDrafter
from forerun.draft.protocol import Drafter
from forerun.engine.engine import CHUNK, Engine
from forerun.engine.probe import ProbeResult, probe
from forerun.engine.request import MAX_DEPTH
from forerun.errors import ForerunError
from forerun.language_model import LanguageModel
from forerun.models.families import build
from forerun.models.layers.decoder import Decoder
from forerun.progress import NullProgress, Progress
from forerun.weights.checkpoint import open_checkpoint
from forerun.weights.find import find
from forerun.weights.tokenizer import load_tokenizer, stop_token_ids

PAGE = 64  # tokens per page
SEQUENCES = 8  # full contexts the cache holds when memory allows
PROBED_WIDTHS = [2, 3, 4, 5, 8, 12, 16]


def load_model(
    model: str = "smollm2",
    *,
    device: str = "auto",
    dtype: str = "auto",
    quantize: str = "auto",
    max_context: int | None = None,
    draft_model: str | None = None,
    progress: Progress | None = None,
) -> LanguageModel:
    """See `forerun.load`."""
    began = time.perf_counter()
    progress = progress or NullProgress()
    machine = plan_machine(device, dtype, quantize)
    folder = find(model, progress=progress)
    with ThreadPoolExecutor(1) as beside:  # importing transformers takes as long as packing a small model
        reading = beside.submit(load_tokenizer, folder)
        decoder = load_decoder(folder, machine, progress)
        tokenizer = reading.result()
    context = context_size(decoder, max_context)
    vocab = min(len(tokenizer), decoder.config.vocab)
    pool = make_pool(decoder, context)
    drafters: dict[str, Drafter] = {"lookup": Lookup()}
    if draft_model is not None:
        drafters["model"] = load_drafter(draft_model, tokenizer, machine, context, vocab, progress)
    result = run_probe(decoder, pool, progress)
    engine = Engine(decoder, pool, drafters, vocab=vocab, context=context, max_width=result.widest)
    return LanguageModel(
        engine=engine,
        tokenizer=tokenizer,
        stop_ids=stop_token_ids(folder, tokenizer),
        machine=machine,
        probe=result,
        load_seconds=time.perf_counter() - began,
    )


def load_decoder(folder: Path, machine: Machine, progress: Progress) -> Decoder:
    """Read a checkpoint folder and pack its weights for the machine."""
    return build(open_checkpoint(folder), machine.kernels, machine.device, machine.dtype, progress)


def context_size(decoder: Decoder, wanted: int | None) -> int:
    """Tokens of context: the model's own, or fewer when asked for."""
    if wanted is None:
        return decoder.config.context
    if not 2 <= wanted <= decoder.config.context:
        raise ForerunError(f"max context must be 2 to {decoder.config.context} for this model, not {wanted}")
    return wanted


def make_pool(decoder: Decoder, context: int) -> PagePool:
    """Pages for several full contexts, as far as a share of the free memory goes."""
    layout = decoder.config.layout
    per_token = 2 * layout.kv_heads * layout.size * decoder.dtype.itemsize * decoder.config.layers
    affordable = int(free_memory(decoder.device) * CACHE_SHARE) // per_token
    tokens = min(SEQUENCES * (context + MAX_DEPTH), affordable)
    pages = tokens // PAGE
    if pages < 2:
        raise ForerunError(
            "there is not enough free memory for a key/value cache: close programs or use a smaller model"
        )
    return PagePool(layout, decoder.config.layers, pages, PAGE, decoder.dtype, decoder.device)


def load_drafter(
    name: str, tokenizer: Any, machine: Machine, context: int, vocab: int, progress: Progress
) -> ModelDrafter:
    """A draft model must speak in the same tokens as the target."""
    folder = find(name, progress=progress)
    if load_tokenizer(folder).get_vocab() != tokenizer.get_vocab():
        raise ForerunError(f"the draft model {name!r} has another tokenizer: use one from the same family as the model")
    decoder = load_decoder(folder, machine, progress)
    if decoder.config.context < context:
        context = decoder.config.context
    return ModelDrafter(decoder, make_pool(decoder, context), min(vocab, decoder.config.vocab), CHUNK)


def run_probe(decoder: Decoder, pool: PagePool, progress: Progress) -> ProbeResult:
    """The exactness probe, through the code that will serve."""
    with progress.task("checking exactness", None), torch.inference_mode():
        return probe(decoder, pool, PROBED_WIDTHS)
