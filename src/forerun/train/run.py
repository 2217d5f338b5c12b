"""`train_head`: from a model to a head's folder."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.device import named_device
from forerun.errors import ForerunError
from forerun.progress import NullProgress, Progress
from forerun.text.chat import encode_prompt
from forerun.train.card import model_card
from forerun.train.chain import fused_chain, fused_works, plain_chain
from forerun.train.data import Writer
from forerun.train.encode import PromptEncoder
from forerun.train.figures import Asked, measure, rate_with_ids
from forerun.train.generate import AnsweredPrompt, share_of_memory
from forerun.train.head import Head
from forerun.train.loop import Trainer, TrainingRecord
from forerun.train.prompts.documents import folder_paragraphs
from forerun.train.prompts.overlap import Overlap
from forerun.train.prompts.prompt import text_of
from forerun.train.prompts.questions import Question, read_evaluation
from forerun.train.save import round_as_saved, save_head
from forerun.train.settings import Settings, default_taps
from forerun.train.start import Start, load_start
from forerun.train.store import FeatureStore
from forerun.train.target import FrozenTarget, load_target
from forerun.train.vocabulary import token_frequency, vocabulary_order
from forerun.train.work import CHECKPOINT, check_recipe, keep_answers, kept_answers, make_folders
from forerun.weights.find import find
from forerun.weights.tokenizer import load_tokenizer, stop_token_ids

GENERATION_SHARE = 0.85  # of the time for data; reading the features takes the rest
FEATURE_SHARE = 0.68  # of the GPU memory that nobody else uses


@dataclass(frozen=True, slots=True)
class Clock:
    """What is left of a run's minutes."""

    began: float  # by the monotonic clock
    minutes: float  # for the whole run; infinite: as long as it takes

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.began

    def left(self, share: float) -> float:
        """Seconds until this share of the run is over."""
        return share * 60 * self.minutes - self.spent


def train_head(
    model: str,
    out: Path,
    settings: Settings,
    *,
    device: str = "auto",
    prompts: Sequence[Path] = (),
    texts: Path | None = None,
    evaluation: Path | None = None,
    work: Path | None = None,
    progress: Progress | None = None,
    log: Callable[[str], None] = lambda _: None,
    stop_after: int | None = None,
    began: float | None = None,
) -> dict[str, Any]:
    """Train, evaluate and save a head; returns the report. Called again after an interruption, it goes on.

    `began`: when the run's minutes began, by the monotonic clock; now, unless given.
    """
    minutes = math.inf if settings.minutes is None else settings.minutes
    clock = Clock(time.monotonic() if began is None else began, minutes)
    progress = progress or NullProgress()
    where = pick_device(device)
    _set_up_torch(where, settings.seed)
    _check_texts(texts, prompts)
    work = work or Path(f"{os.path.abspath(out)}.work")  # "." has no name of its own
    folder = find(model, progress=progress)
    make_folders(out, work)
    target = load_target(folder, where)
    start = load_start(target, settings, log)
    tokenizer = load_tokenizer(folder)
    encoder, ends = PromptEncoder(tokenizer, target.config.vocab), stop_token_ids(folder, tokenizer)
    questions = read_evaluation(evaluation)
    asked = _askable(questions, encoder, target.config.context - settings.evaluation_tokens, log)
    log(f"loaded {folder.name} on {where}, {clock.spent:.0f} s")
    head = _new_head(target, start, settings, log)
    data = {
        "prompts": [str(path.absolute()) for path in prompts],
        "texts": None if texts is None else str(texts.absolute()),
        "evaluation": _digest(questions),  # the answers are kept apart from this one
    }
    check_recipe(work, {"model": model} | settings.recipe() | data)
    overlap = Overlap(text_of(question.prompt) for question in questions)
    writer = Writer(target, encoder, ends, settings, overlap, progress, log)
    room = settings.feature_bytes or share_of_memory(where, FEATURE_SHARE)
    limit = room // FeatureStore.bytes_per_token(target, head.taps)
    answers, sources = _answers(writer, work, prompts, texts, clock.left(GENERATION_SHARE * settings.data_share), limit)
    store = FeatureStore(target, head.taps, answers)
    with progress.task("reading the answers", len(answers)) as task:
        store.fill(task.advance)
    scales = store.scales()
    log(f"{len(store.tokens)} tokens read, {clock.spent:.0f} s")
    if start is None:
        head.start(scales, settings.seed)
    # What the target nearly said counts as well: answers to prompts of few kinds lack many ordinary words.
    frequency = token_frequency(answers, target.config.vocab).to(where) + store.mass
    trainer = Trainer(head, store, frequency, settings, log)
    seconds = max(clock.left(1 - settings.evaluation_share), 1.0)
    record = trainer.run(seconds, work / CHECKPOINT, progress, stop_after)
    trainer.keep_best()
    round_as_saved(head)  # the figures are those of what is saved
    log(f"trained {record.steps} steps, {clock.spent:.0f} s")
    del store, trainer  # evaluation needs their memory
    report, draft_vocab = _measured(head, asked, ends, frequency, start, settings, progress)
    report |= _describe(settings, head, record, answers, sources, where)
    report["history"] = [] if start is None else start.history
    card = model_card(folder.name.split(".")[0], report, bool(prompts))
    save_head(out, head, draft_vocab, report, card)
    log(f"saved {out}, {clock.spent:.0f} s")
    return report


def _set_up_torch(where: torch.device, seed: int) -> None:
    torch.manual_seed(seed)
    if where.type == "cuda":
        torch.set_float32_matmul_precision("high")  # products of bfloat16 values: nothing is lost
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape


def _check_texts(texts: Path | None, prompts: Sequence[Path]) -> None:
    """What cannot be used is refused before a model is loaded for it."""
    if texts is not None and prompts:
        raise ForerunError("--texts is for the built-in prompts: drop it, or drop --prompts")
    if texts is not None:
        folder_paragraphs(texts)


def pick_device(name: str) -> torch.device:
    """`auto`: a CUDA device when there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return named_device(name, ("cpu", "cuda"))


def _attention(target: FrozenTarget, log: Callable[[str], None]) -> Any:
    """The fused attention where it is right, else the plain one."""
    layout = target.config.layout
    wrong = fused_works(layout.heads, layout.size, target.device, target.dtype)
    if wrong:
        log(f"the fused attention does not work here ({wrong}); training will be slower")
        return plain_chain
    return fused_chain


def _new_head(target: FrozenTarget, start: Start | None, settings: Settings, log: Callable[[str], None]) -> Head:
    """A head of the shape that is asked for; one to go on from is put into it.

    That is done before any answer is written, so that a head that does not fit is refused at once.
    """
    layers = len(target.config.layers)
    taps = default_taps(layers) if settings.taps is None else settings.taps
    if start is not None:
        taps = start.taps
    if any(not 0 <= tap < layers for tap in taps):
        raise ForerunError(f"the model has layers 0 to {layers - 1}: tap among those")
    width = settings.intermediate or (None if start is None else start.intermediate)
    head = Head(target, taps, width, _attention(target, log))
    if start is not None:
        start.put_into(head, settings.seed)
    return head


def _measured(
    head: Head,
    asked: Sequence[Asked],
    ends: frozenset[int],
    frequency: Tensor,
    start: Start | None,
    settings: Settings,
    progress: Progress,
) -> tuple[dict[str, Any], Tensor | None]:
    """The figures, and the ids that the head may draft; None: all."""
    vocab, tokens = head.config.vocab, settings.evaluation_tokens
    size, first = _draft_vocab(settings, start, vocab)
    order = vocabulary_order(frequency, first)
    report = measure(head, asked, ends, order, size, tokens, progress)
    if start is not None and start.draft_vocab is not None and first is None:
        old = vocabulary_order(frequency, start.draft_vocab)
        rate = rate_with_ids(head, asked, ends, old, len(start.draft_vocab), tokens)
        report["draft_vocab"]["tokens_per_round"]["as it started"] = rate
    size = report["draft_vocab"]["size"]
    return report, order[:size] if size < vocab else None


def _draft_vocab(settings: Settings, start: Start | None, vocab: int) -> tuple[int | None, Tensor | None]:
    """Size of the draft vocabulary and the ids that must be in it; None: decided from the data.

    A head that is trained further keeps its ids unless a size is asked for.
    """
    if settings.draft_vocab is not None:
        return min(settings.draft_vocab, vocab), None
    if start is None:
        return None, None
    return (vocab, None) if start.draft_vocab is None else (len(start.draft_vocab), start.draft_vocab)


def _digest(questions: Sequence[Question]) -> str:
    """The same for the same prompts."""
    return hashlib.sha256(json.dumps([question.prompt for question in questions]).encode()).hexdigest()


def _askable(
    questions: Sequence[Question], encoder: PromptEncoder, most: int, log: Callable[[str], None]
) -> list[Asked]:
    """Those with at most so many tokens that the model can be asked: without a template it takes no conversations.

    Found out before anything is trained: a run that ends here is lost.
    """
    found = []
    for question in questions:
        try:
            ids = encode_prompt(encoder.tokenizer, question.prompt)
        except ForerunError:
            continue
        if len(ids) <= most and max(ids) < encoder.vocab:
            found.append(Asked(question, ids))
    if not found:
        raise ForerunError("the model can be asked no evaluation prompt: give short ones, as text, with --evaluation")
    if left_out := len(questions) - len(found):
        log(f"{left_out} of {len(questions)} evaluation prompts left out: too long, or not what the template takes")
    return found


def _answers(
    writer: Writer,
    work: Path,
    prompts: Sequence[Path],
    texts: Path | None,
    seconds: float,
    token_limit: int,
) -> tuple[list[AnsweredPrompt], dict[str, int]]:
    """Answers of an earlier part of the run, or new ones."""
    kept = kept_answers(work)
    if kept is not None:
        writer.log(f"{len(kept[0])} answers found in {work}")
        return kept
    if prompts:
        writer.from_user(prompts, seconds, token_limit)
    else:
        writer.built_in(texts, seconds, token_limit)
    if len(writer.answers) < 2:
        raise ForerunError("the model wrote no usable answers in the time given: give it more minutes or other prompts")
    if writer.target.device.type == "cuda":
        torch.cuda.empty_cache()
    sources = dict(writer.sources)
    keep_answers(work, writer.answers, sources)
    return writer.answers, sources


def _describe(
    settings: Settings,
    head: Head,
    record: TrainingRecord,
    answers: Sequence[AnsweredPrompt],
    sources: dict[str, int],
    where: Any,
) -> dict[str, Any]:
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else "a CPU"
    tokens = sum(len(answer.prompt) + len(answer.answer) for answer in answers)
    count = sum(tensor.numel() for tensor in head.weights.values())
    training = asdict(record) | {"unroll": settings.unroll, "decay": settings.decay, "rate": settings.peak}
    training |= {"hard": settings.aim(0.0)[0], "agree": settings.aim(1.0)[1], "agree_from": settings.agrees_from}
    training |= {"optimiser": "AdamW" if settings.continues else "Muon and AdamW"}
    training |= {"agree_at": list(settings.agree_at), "missed": settings.missed}
    return {
        "head": {"taps": list(head.taps), "intermediate": head.intermediate, "parameters": count},
        "data": {"answers": len(answers), "tokens": tokens, "sources": sources},
        "training": training,
        "evaluation_tokens": settings.evaluation_tokens,
        "device": name,
        "settings": asdict(settings) | {"start_from": settings.start_from and Path(settings.start_from).name},
    }
