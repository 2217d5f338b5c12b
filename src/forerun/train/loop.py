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

from forerun.errors import ForerunError
from forerun.progress import Progress
from forerun.train.head import Head
from forerun.train.loss import Support, draw_support, soft_cross_entropy, teacher
from forerun.train.settings import Settings
from forerun.train.store import Batch, FeatureStore

REPORT_STEPS = 50
HELD_OUT = 0.01  # of the sequences, to watch for overfitting
HELD_OUT_MOST = 256


@dataclass(slots=True)
class Record:
    """How training went."""

    steps: int = 0
    positions: int = 0
    seconds: float = 0.0
    losses: list[tuple[int, float]] = field(default_factory=list)
    held_out: list[tuple[int, float, float]] = field(default_factory=list)  # step, loss, first draft right


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
        groups = [
            {"params": list(head.matrices()), "weight_decay": settings.weight_decay},
            {"params": list(head.vectors()), "weight_decay": 0.0},
        ]
        fused = device.type == "cuda"
        self.optimiser = torch.optim.AdamW(groups, lr=settings.rate, betas=(0.9, 0.95), fused=fused)
        self.generator = torch.Generator(device=device)
        every = np.random.default_rng(settings.seed).permutation(len(store.lengths))
        held = min(HELD_OUT_MOST, max(int(HELD_OUT * len(every)), len(every) >= 8))
        self.held, self.usable = every[:held], every[held:]
        self.record = Record()

    def run(self, seconds: float | None, checkpoint: Path, progress: Progress, stop_after: int | None = None) -> Record:
        """Train until the steps are done or so many seconds from now are over.

        `stop_after`: leave after so many steps, as an interruption would.
        """
        steps = self.settings.steps
        if steps is None and seconds is None:
            raise ForerunError("say how long to train: give minutes or steps")
        self.load(checkpoint)
        record = self.record
        if seconds is not None:
            seconds += record.seconds  # the schedule counts what an earlier run has spent
        began, saved = time.monotonic() - record.seconds, time.monotonic()
        epoch, groups = -1, list[np.ndarray]()
        per_epoch: list[int] = []  # the noise in the lengths makes epochs differ by a batch or so
        done = 0
        with progress.task("training the head", steps or 1000) as task:
            shown = 0
            while True:
                record.seconds = time.monotonic() - began
                fraction = max(record.steps / steps if steps else 0.0, record.seconds / seconds if seconds else 0.0)
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
                self._step(groups[at], fraction)
                done += 1
                if time.monotonic() - saved > self.settings.checkpoint_seconds:
                    self.save(checkpoint)
                    saved = time.monotonic()
        self._report(fraction)
        self.save(checkpoint)
        return record

    def _step(self, chosen: np.ndarray, fraction: float) -> None:
        record, settings = self.record, self.settings
        rate = settings.rate * _schedule(fraction, settings)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        batch = self.store.batch(chosen, settings.unroll)
        loss = self.loss(batch, self._support(record.steps))
        loss.backward()
        parameters = list(self.head.weights.values())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for gradient in gradients:
            gradient.nan_to_num_(0.0, 0.0, 0.0)
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
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

    def loss(self, batch: Batch, support: Support) -> Tensor:
        """Mean over positions of the cross-entropy with the target, later drafts counting less."""
        settings = self.settings
        chances = teacher(batch.hidden, batch.whole, support)
        outputs = self.head.unroll(batch.features, batch.following, settings.unroll)
        total = sum(settings.decay**step for step in range(settings.unroll))
        losses = []
        for step, output in enumerate(outputs):
            reached = batch.depth >= step
            base = (batch.position - 1 - step).clamp_min(0)
            share = settings.decay**step / total
            weights = share * reached / reached.sum().clamp_min(1)
            rows = output.flatten(0, 1).index_select(0, batch.sequence * output.shape[1] + base)
            losses.append(soft_cross_entropy(rows, support, chances, weights))
        return torch.stack(losses).sum()

    @torch.no_grad()
    def _report(self, fraction: float) -> None:
        record = self.record
        loss, right = self.watch()
        record.held_out.append((record.steps, round(loss, 4), round(right, 4)))
        speed = record.positions / max(record.seconds, 1e-9)
        recent = record.losses[-1][1] if record.losses else float("nan")
        self.log(
            f"step {record.steps} ({fraction:.0%}), {record.positions / 1e6:.1f} M positions, {speed / 1e3:.0f} k/s, "
            f"loss {recent:.3f}, held out {loss:.3f}, first draft right {right:.3f}"
        )

    def watch(self) -> tuple[float, float]:
        """Loss and share of right first drafts on answers that are not trained on."""
        if len(self.held) == 0:
            return float("nan"), float("nan")
        support = self._support(0)
        losses, right, count = [], 0, 0
        for start in range(0, len(self.held), 32):
            batch = self.store.batch(self.held[start : start + 32], self.settings.unroll)
            losses.append(float(self.loss(batch, support)))
            first = self.head.unroll(batch.features, batch.following, 1)[0]
            rows = first[batch.sequence, batch.position - 1]
            mine = (rows @ support.matrix.T).argmax(-1)
            right += int((mine == (batch.hidden @ support.matrix.T).argmax(-1)).sum())
            count += len(rows)
        return sum(losses) / len(losses), right / max(count, 1)

    def save(self, file: Path) -> None:
        """The checkpoint appears whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        record = self.record
        state: dict[str, Any] = {
            "weights": {name: tensor.detach() for name, tensor in self.head.weights.items()},
            "optimiser": self.optimiser.state_dict(),
            "record": [record.steps, record.positions, record.seconds, record.losses, record.held_out],
        }
        beside = file.with_suffix(".part")
        torch.save(state, beside)
        os.replace(beside, file)

    def load(self, file: Path) -> None:
        """Go on from a checkpoint, when there is one."""
        if not file.is_file():
            return
        state = torch.load(file, map_location=self.head.target.device, weights_only=True)
        with torch.no_grad():
            for name, tensor in self.head.weights.items():
                tensor.copy_(state["weights"][name])
        self.optimiser.load_state_dict(state["optimiser"])
        self.record = Record(*state["record"])
        self.log(f"going on from step {self.record.steps}")


def _schedule(fraction: float, settings: Settings) -> float:
    """Linear warm-up, then a cosine down to the final rate."""
    if fraction < settings.warmup:
        return max(fraction, 1e-3) / settings.warmup
    along = (fraction - settings.warmup) / (1 - settings.warmup)
    return settings.final_rate + (1 - settings.final_rate) * 0.5 * (1 + math.cos(math.pi * min(along, 1.0)))
