"""For trainers: tokens in, tokens out, many answers at once; and new weights between two rounds of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from forerun.draft.mtp import MtpDrafter
from forerun.engine.interrupts import interrupts_held
from forerun.engine.request import Request
from forerun.engine.sequence import Sequence as Running
from forerun.engine.sequence import Status
from forerun.errors import ForerunError
from forerun.models.families import build
from forerun.options import PROMPT, GenerationOptions, whole_number
from forerun.policy.acceptance import Priors
from forerun.policy.kinds import kind_of
from forerun.progress import NullProgress
from forerun.response import Rollout
from forerun.text.answer import NoText
from forerun.weights.updated import UpdatedCheckpoint

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.language_model import LanguageModel

OF_TEXT = ("stop", "lang_bias")


def generate_tokens(
    model: LanguageModel,
    ids: Sequence[int] | Sequence[Sequence[int]],
    n: int = 1,
    logprobs: bool = True,
    stop_ids: Sequence[int] | None = None,
    **given: Any,
) -> list[Rollout]:
    """See `LanguageModel.generate_tokens`."""
    options = GenerationOptions.of(given)
    for entry in fields(options):
        if entry.name in given and (entry.name in OF_TEXT or entry.metadata["topic"] == PROMPT):
            raise ForerunError(f"{entry.name} is about text, and generate_tokens knows tokens only: leave it out")
    count = whole_number("n", n)
    if count is None or count < 1:
        raise ForerunError(f"n must be a whole number from 1 up, not {n!r}")
    sampling = options.sampling(None)
    sampling.check_vocabulary(model.engine.vocab)
    ends = model.stop_ids if stop_ids is None else frozenset(stop_ids)
    requests = [
        Request(
            prompt=prompt,
            sampling=replace(sampling, choice=choice),
            max_tokens=options.max_tokens,
            stop_ids=ends,
            draft=options.draft,
            draft_tokens=None if options.draft_tokens == "auto" else options.draft_tokens,
            accept=options.accept,
            kind=kind_of(prompt, "") if options.draft == "auto" else "",
            logprobs=0 if logprobs else None,
        )
        for prompt in prompts_of(ids)
        for choice in range(count)
    ]
    return _run(model, requests)


def prompts_of(ids: Sequence[int] | Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """One prompt or several."""
    if not len(ids):
        raise ForerunError("the prompt is empty: give at least one token")
    several: Any = [ids] if isinstance(ids[0], int) else ids
    prompts = [tuple(prompt) for prompt in several]
    if not all(type(token) is int for prompt in prompts for token in prompt):
        raise ForerunError("a prompt must be a list of token ids, or a list of such lists")
    return prompts


def _run(model: LanguageModel, requests: Sequence[Request]) -> list[Rollout]:
    """All of them side by side, to their ends."""
    engine, sequences = model.engine, list[Running]()
    for request in requests:
        engine.check(request)
    try:
        for request in requests:
            with interrupts_held():  # else nobody would release it
                sequences.append(engine.submit(request, NoText()))
        while not all(sequence.status is Status.FINISHED for sequence in sequences):
            with interrupts_held(), engine.owner:
                engine.step()
                if engine.scheduler.idle and any(one.status is Status.WAITING for one in sequences):
                    raise ForerunError("there is no memory left for these answers: close others, or ask for fewer")
        return [_rollout(model, sequence) for sequence in sequences]
    finally:
        for sequence in sequences:
            engine.release(sequence)


def _rollout(model: LanguageModel, sequence: Running) -> Rollout:
    if sequence.error is not None:
        raise sequence.error
    tokens = [emission.token for emission in sequence.emissions]
    found = [emission.logprob for emission in sequence.emissions]
    if sequence.stop is not None:
        tokens.append(sequence.stop)
        found.append(sequence.stop_logprob)
    return Rollout(
        prompt=list(sequence.request.prompt),
        tokens=tokens,
        logprobs=[one.value for one in found if one is not None],
        finish_reason=sequence.finish_reason or "cancelled",
        response=model.response(sequence, ""),
    )


def update_weights(model: LanguageModel, tensors: Mapping[str, Tensor]) -> None:
    """See `LanguageModel.update_weights`."""
    engine = model.engine
    if model.machine.graphs:
        raise ForerunError("weights are updated on a CPU only so far: on a GPU load the model again")
    if not tensors:
        raise ForerunError("there is nothing to update: give tensors by their names")
    if "assistant" in engine.drafters:
        raise ForerunError("the model was loaded with an assistant, which is not updated: load it without one")
    mine = next((name for name in tensors if name.startswith("mtp.")), None)
    if mine is not None:
        raise ForerunError(f"{mine} belongs to the model's MTP head, which is not updated: leave it out")
    with interrupts_held(), engine.owner:
        if engine.scheduler.active or engine.scheduler.waiting:
            raise ForerunError("answers are under way: let them end, or close them, before the weights change")
        old = engine.model
        checkpoint = UpdatedCheckpoint(old.checkpoint, tensors)
        new = build(checkpoint, old.kernels, old.device, old.dtype, NullProgress())
        output = old.head
        old.adopt(new)
        drafter = engine.drafters.by_name.get("mtp")
        if isinstance(drafter, MtpDrafter):
            drafter.target_changed(old, output)
        engine.pool.prefix.clear()
        model.prefix_file = None  # it belongs to the weights in the model's files
        engine.policy.priors = Priors()  # what was accepted of drafts for the old ones says little now
