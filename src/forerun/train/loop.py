"""The training loop: time-boxed or counted, with checkpoints it can go on from."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.engine.interrupts import interrupts_held
from forerun.errors import ForerunError
from forerun.progress import Progress
from forerun.train.average import WeightAverage, copied, put, weights_replaced
from forerun.train.head import Head
from forerun.train.loss import Aim, Support, draft_loss, draw_support, teacher
from forerun.train.optimisers import optimisers
from forerun.train.settings import Settings
from forerun.train.store import Batch, FeatureStore
from forerun.train.work import sound

REPORT_STEPS = 50
HELD_OUT = 0.01  # of the sequences, to watch for overfitting
HELD_OUT_MOST = 256
ENOUGH = 2000  # held-out tokens that tell which weights are better
DEPTH = 4  # drafts per round, for the tokens per round that are watched


@dataclass(slots=True)
class TrainingRecord:
    """How training went."""

    steps: int = 0
    positions: int = 0
    seconds: float = 0.0
    losses: list[tuple[int, float]] = field(default_factory=list)
    held_out: list[tuple[int, float, float]] = field(default_factory=list)  # step, loss, first draft right
    kept: str = ""  # which weights did best at the end, and the tokens per round of all


@dataclass(frozen=True, slots=True)
class Watched:
    """How a head does on answers that are not trained on."""

    loss: float
    first: float  # share of right first drafts
    rate: float  # tokens per round if every position began one


class Trainer:
    """Optimiser, order of batches and schedule around a head."""

    def __init__(
        self,
        head: Head,
        store: FeatureStore,
        frequency: Tensor,
        settings: Settings,
        log: Callable[[str], None],
    ) -> None:
        self.head, self.store, self.settings, self.log = head, store, settings, log
        vocab = head.config.vocab
        order = frequency.argsort(descending=True, stable=True)
        count = min(settings.frequent, vocab)
        self.frequent, self.rest = order[:count].sort().values, order[count:].sort().values
        self.output = head.target.output
        device = head.target.device
        self.batch_tokens = settings.batch_tokens or (32_768 if device.type == "cuda" else 1024)
        self.optimisers = optimisers(head, settings)
        self.average = WeightAverage(head.weights, settings.average)
        self.began_with = copied(head.weights)
        self.generator = torch.Generator(device=device)
        every = np.random.default_rng(settings.seed).permutation(len(store.lengths))
        held = min(HELD_OUT_MOST, max(int(HELD_OUT * len(every)), len(every) >= 8))
        self.held, self.usable = every[:held], every[held:]
        self.record = TrainingRecord()

    def run(
        self, seconds: float, checkpoint: Path, progress: Progress, stop_after: int | None = None
    ) -> TrainingRecord:
        """Train until the steps are done or so many seconds from now are over.

        `stop_after`: leave after so many steps, as an interruption would. Ctrl-C ends a step and leaves a checkpoint.
        """
        steps = self.settings.steps
        if steps is None and seconds == math.inf:
            raise ForerunError("say how long to train: give minutes or steps")
        self.load(checkpoint)
        record = self.record
        seconds += record.seconds  # the schedule counts what an earlier run has spent
        began, saved = time.monotonic() - record.seconds, time.monotonic()
        epoch, groups = -1, list[np.ndarray]()
        per_epoch: list[int] = []  # the noise in the lengths makes epochs differ by a batch or so
        done = 0
        try:
            with progress.task("training the head", steps or 1000) as task:
                shown = 0
                while True:
                    record.seconds = time.monotonic() - began
                    fraction = max(record.steps / steps if steps else 0.0, record.seconds / seconds)
                    target = record.steps if steps else int(1000 * fraction)
                    task.advance(max(0, target - shown))
                    shown = max(shown, target)
                    if fraction >= 1 or done == stop_after:
                        break
                    while record.steps >= sum(per_epoch[: epoch + 1]):
                        epoch += 1
                        groups = self.store.epoch(self.usable, self.batch_tokens, self.settings.seed * 7919 + epoch)
                        per_epoch[epoch:] = [len(groups)]
                    at = record.steps - sum(per_epoch[:epoch])
                    with interrupts_held():
                        self._step(groups[at], fraction)
                    done += 1
                    if time.monotonic() - saved > self.settings.checkpoint_seconds:
                        self.save(checkpoint)
                        saved = time.monotonic()
        except KeyboardInterrupt:
            self.save(checkpoint)
            raise
        self._report(fraction)
        self.save(checkpoint)
        return record

    @torch.no_grad()
    def keep_best(self) -> None:
        """Give the head the weights that draft best on held-out answers: the last, their average, or the first."""
        weights = self.head.weights
        choices = {"averaged": self.average.values, "last": copied(weights), "first": self.began_with}
        rates: dict[str, float] = {}
        for name, values in choices.items():
            with weights_replaced(weights, values):
                rates[name] = self.watch().rate
        tells = self.store.lengths[self.held].sum() - self.store.prompts[self.held].sum() >= ENOUGH
        best = max(rates, key=lambda name: rates[name]) if tells else "last"
        put(weights, choices[best])
        self.record.kept = f"{best} (" + ", ".join(f"{name} {rate:.3f}" for name, rate in rates.items()) + ")"
        self.log(f"weights kept: {self.record.kept}")

    def _step(self, chosen: np.ndarray, fraction: float) -> None:
        record, settings = self.record, self.settings
        rate = settings.peak * _schedule(fraction, settings)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
        batch = self.store.batch(chosen, settings.unroll)
        loss = self.loss(batch, self._support(record.steps), fraction)
        loss.backward()
        parameters = list(self.head.weights.values())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for gradient in gradients:
            gradient.nan_to_num_(0.0, 0.0, 0.0)
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.average.add(self.head.weights)
        record.steps += 1
        record.positions += len(batch.sequence)
        if record.steps == 1 or record.steps % REPORT_STEPS == 0:
            value = float(loss.detach())
            if not math.isfinite(value):
                raise ForerunError("the loss is not finite any more: train again with a smaller --rate")
            record.losses.append((record.steps, round(value, 4)))
            if record.steps % (10 * REPORT_STEPS) == 0:
                self._report(fraction)

    def _support(self, step: int) -> Support:
        self.generator.manual_seed(self.settings.seed * 1_000_003 + step)
        return draw_support(self.output, self.frequent, self.rest, self.settings.others, self.generator)

    def loss(self, batch: Batch, support: Support, fraction: float = 0.0) -> Tensor:
        """Mean over positions, later drafts counting less, of what the head is trained for at this point of the run."""
        settings = self.settings
        return self._drafted(batch, support, Aim(*settings.aim(fraction), settings.agree_at), settings.missed)[0]

    def _drafted(self, batch: Batch, support: Support, aim: Aim, missed: float) -> tuple[Tensor, list[Tensor]]:
        """The loss, and per step how often the drafts up to there are all right."""
        settings = self.settings
        taught = teacher(batch.hidden, batch.whole, support, aim)
        outputs = self.head.unroll(batch.features, batch.following, settings.unroll, batch.first)
        total = sum(settings.decay**step for step in range(settings.unroll))
        losses, prefixes = [], []
        all_right = torch.ones_like(batch.depth, dtype=torch.bool)  # every draft before this one, from the same base
        for step, output in enumerate(outputs):
            reached = batch.depth >= step
            counted = reached
            if step and missed < 1:
                lucky = torch.rand(len(reached), generator=self.generator, device=reached.device) < missed
                counted = reached & (all_right | lucky)
            chosen = counted.nonzero()[:, 0]
            many = reached.sum().clamp_min(1)
            base = batch.position[chosen] - 1 - step - batch.first
            rows = output.flatten(0, 1).index_select(0, batch.sequence[chosen] * output.shape[1] + base)
            weights = (settings.decay**step / total / many).expand(len(chosen))
            loss, drafts = draft_loss(rows, support, taught.at(chosen), aim.agree, weights)
            losses.append(loss)
            right = torch.zeros_like(all_right)
            right[chosen] = drafts == taught.top[chosen]
            right &= all_right & reached
            prefixes.append(right.sum() / many)
            # The draft after this one, from the same base, stands one row further down.
            all_right = torch.cat((right.new_zeros(1), right[:-1]))
        return torch.stack(losses).sum(), prefixes

    @torch.no_grad()
    def _report(self, fraction: float) -> None:
        record = self.record
        last = self.watch()
        with weights_replaced(self.head.weights, self.average.values):
            averaged = self.watch()
        record.held_out.append((record.steps, round(last.loss, 4), round(last.first, 4)))
        speed = record.positions / max(record.seconds, 1e-9)
        recent = record.losses[-1][1] if record.losses else float("nan")
        self.log(
            f"step {record.steps} ({fraction:.0%}), {record.positions / 1e6:.1f} M positions, {speed / 1e3:.0f} k/s, "
            f"loss {recent:.3f}; held out: loss {last.loss:.3f}, first draft {last.first:.4f}, "
            f"{last.rate:.3f} a round; averaged {averaged.first:.4f}, {averaged.rate:.3f}"
        )

    @torch.no_grad()
    def watch(self) -> Watched:
        """Plain loss and acceptance on answers that are not trained on."""
        if len(self.held) == 0:
            return Watched(float("nan"), float("nan"), float("nan"))
        support = self._support(0)
        sums, count = torch.zeros(3), 0
        for start in range(0, len(self.held), 32):
            batch = self.store.batch(self.held[start : start + 32], self.settings.unroll)
            loss, prefixes = self._drafted(batch, support, Aim(), missed=1.0)
            rate = 1 + sum(prefixes[:DEPTH], torch.zeros_like(loss))
            sums += len(batch.depth) * torch.stack((loss, prefixes[0], rate)).float().cpu()
            count += len(batch.depth)
        mean = (sums / max(count, 1)).tolist()
        return Watched(mean[0], mean[1], mean[2])

    def save(self, file: Path) -> None:
        """The checkpoint appears whole or not at all; without room for it training goes on."""
        record = self.record
        state: dict[str, Any] = {
            "weights": {name: tensor.detach() for name, tensor in self.head.weights.items()},
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "average": self.average.values,
            "average_count": self.average.count,
            "began_with": self.began_with,
            "record": [record.steps, record.positions, record.seconds, record.losses, record.held_out],
        }
        beside = file.with_suffix(".part")
        try:
            with beside.open("wb") as stream:
                torch.save(state, stream)
            os.replace(beside, file)
        except (OSError, RuntimeError) as error:
            refused = error if isinstance(error, OSError) else error.__context__  # torch hides what the system said
            if not isinstance(refused, OSError):
                raise
            beside.unlink(missing_ok=True)
            self.log(f"no checkpoint could be written to {file.parent}: {refused.strerror}; training goes on")

    def load(self, file: Path) -> None:
        """Go on from a checkpoint, when there is one."""
        if not file.is_file():
            return
        with sound(file.parent):
            state = torch.load(file, map_location=self.head.target.device, weights_only=True)
        if "optimisers" not in state:
            raise ForerunError(
                f"{file.parent} holds a run of an earlier version: delete it, or give another --work folder"
            )
        put(self.head.weights, state["weights"])
        self.average.load(state["average"], state["average_count"])
        self.began_with = state["began_with"]
        for optimiser, held in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(held)
        self.record = TrainingRecord(*state["record"])
        self.log(f"going on from step {self.record.steps}")


def _schedule(fraction: float, settings: Settings) -> float:
    """Linear warm-up, then a cosine down to the final rate."""
    if fraction < settings.warmup:
        return max(fraction, 1e-3) / settings.warmup
    along = (fraction - settings.warmup) / (1 - settings.warmup)
    return settings.final_rate + (1 - settings.final_rate) * 0.5 * (1 + math.cos(math.pi * min(along, 1.0)))
