"""Runs the arms on the workloads, interleaved: within every prompt plain decoding comes first and last."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import forerun
from forerun.bench.peers import Peer
from forerun.bench.statistics import Interval, median
from forerun.bench.workloads import Workload, WorkloadPrompt
from forerun.draft.arms import DRAFT_CHOICES
from forerun.language_model import LanguageModel
from forerun.progress import Progress
from forerun.response import Response
from forerun.text.chat import encode_prompt

PLAIN = "plain"
NAMED_ARMS = tuple(choice for choice in DRAFT_CHOICES if choice not in ("auto", "off"))  # what a user could have named
WARM_UP_TOKENS = 24


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One answer: its tokens, seconds of decoding and of the whole request, and what the rounds brought."""

    tokens: list[int]
    seconds: float
    whole: float
    rounds: int = 0
    accepted: int = 0
    per_position: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, answer: Response, seconds: float, whole: float) -> MeasuredRun:
        """An answer of ours."""
        return cls(answer.tokens, seconds, whole, answer.rounds, answer.accepted, answer.per_position)


@dataclass(slots=True)
class Cell:
    """One arm on one workload at one temperature. `ratios` and `wholes` have one entry per pair with plain decoding."""

    workload: str
    arm: str
    temperature: float
    runs: list[MeasuredRun] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    wholes: list[float] = field(default_factory=list)
    equal: int = 0

    @property
    def total(self) -> int:
        return len(self.runs)

    @property
    def same(self) -> bool:
        """Are all texts those of plain decoding? Without that there is no speed-up to speak of."""
        return self.equal == self.total

    @property
    def ratio(self) -> Interval | None:
        """Seconds of plain decoding over this arm's, for the same text."""
        return median(self.ratios) if self.same and self.ratios else None

    @property
    def whole_ratio(self) -> Interval | None:
        """The same for whole requests, reading the prompt included."""
        return median(self.wholes) if self.same and self.wholes else None

    @property
    def tokens_per_second(self) -> float:
        seconds = sum(run.seconds for run in self.runs)
        return sum(max(0, len(run.tokens) - 1) for run in self.runs) / seconds if seconds else 0.0

    @property
    def tokens_per_round(self) -> float | None:
        rounds = sum(run.rounds for run in self.runs)
        return 1 + sum(run.accepted for run in self.runs) / rounds if rounds else None

    @property
    def accepted_per_position(self) -> list[float]:
        """Of the drafts that reached a position, the share accepted there (and at all positions before it)."""
        deepest = max((len(run.per_position) for run in self.runs), default=0)
        shares = []
        for position in range(deepest):
            pairs = [run.per_position[position] for run in self.runs if position < len(run.per_position)]
            shares.append(sum(accepted for _, accepted in pairs) / sum(drafted for drafted, _ in pairs))
        return shares


class WorkloadRunner:
    """Measures cell by cell: `arms` by their options, beside plain decoding and `peers`.

    `price` is what exactness costs a plain step, so that "plain" is the fastest there is.
    """

    def __init__(
        self,
        model: LanguageModel,
        arms: Mapping[str, Mapping[str, Any]],
        peers: Sequence[Peer],
        price: float,
        progress: Progress,
    ) -> None:
        self.model, self.peers, self.price, self.progress = model, peers, price, progress
        self.arms, self.options = list(arms), {PLAIN: {"draft": "off"}, **arms}

    def measure(self, workloads: Sequence[Workload], temperatures: Sequence[float]) -> list[Cell]:
        """All cells: for each temperature and workload plain decoding, the arms, then the peers."""
        cells: list[Cell] = []
        total = len(temperatures) * sum(len(workload.prompts) for workload in workloads)
        self._warm_up(workloads[0])
        with self.progress.task("measuring", total) as task:
            for temperature in temperatures:
                for workload in workloads:
                    names = [PLAIN, *self.arms, *(peer.name for peer in self.peers)]
                    row = {name: Cell(workload.name, name, temperature) for name in names}
                    for number, prompt in enumerate(workload.prompts):
                        self._compare(row, prompt, workload.answer_tokens, number)
                        task.advance()
                    cells += row.values()
        return cells

    def _warm_up(self, workload: Workload) -> None:
        """Everybody once, unmeasured: what runs first pays for cold caches."""
        for arm in (PLAIN, *self.arms):
            self._ours(arm, workload.prompts[0], 0.0, WARM_UP_TOKENS, 0)
        for peer in self.peers:
            self._theirs(peer, workload.prompts[0], 0.0, WARM_UP_TOKENS, 0)

    def _compare(self, row: dict[str, Cell], prompt: WorkloadPrompt, tokens: int, number: int) -> None:
        """One prompt through all arms. Plain decoding before and after them cancels a machine that drifts."""
        temperature = row[PLAIN].temperature
        first = self._ours(PLAIN, prompt, temperature, tokens, number)
        turn = number % max(1, len(self.arms))
        found = {
            arm: self._ours(arm, prompt, temperature, tokens, number)
            for arm in self.arms[turn:] + self.arms[:turn]  # nobody always goes first
        }
        found |= {peer.name: self._theirs(peer, prompt, temperature, tokens, number) for peer in self.peers}
        last = self._ours(PLAIN, prompt, temperature, tokens, number)
        _note(row[PLAIN], last, first, first.seconds, first.whole)
        fastest = sqrt(first.seconds * last.seconds) / self.price
        whole = sqrt(first.whole * last.whole)
        for name, run in found.items():
            _note(row[name], run, first, fastest, whole)

    def _ours(self, arm: str, prompt: WorkloadPrompt, temperature: float, tokens: int, seed: int) -> MeasuredRun:
        options: dict[str, Any] = {"max_tokens": tokens, "temperature": temperature, "seed": seed}
        began = time.perf_counter()
        with forerun.stream(self.model, prompt.content, **self.options[arm], **options) as answer:
            started = time.perf_counter()
            for _ in answer:
                pass
            ended = time.perf_counter()
            response = answer.response()
        # Wall time, not the engine's own: deciding what to draft belongs to the cost of drafting.
        decoding = ended - started - response.seconds["prefill"]
        return MeasuredRun.of(response, decoding, ended - began)

    def _theirs(self, peer: Peer, prompt: WorkloadPrompt, temperature: float, tokens: int, seed: int) -> MeasuredRun:
        ids = encode_prompt(self.model.tokenizer, prompt.content)
        answer = peer.answer(ids, temperature, tokens, seed)
        return MeasuredRun(answer.tokens, answer.seconds, answer.whole)


def _note(cell: Cell, run: MeasuredRun, plain: MeasuredRun, seconds: float, whole: float) -> None:
    """Enter a run beside plain decoding of the same prompt. An answer that ends at once has nothing to compare."""
    cell.runs.append(run)
    cell.equal += run.tokens == plain.tokens
    if len(plain.tokens) > 1 and run.seconds > 0:
        cell.ratios.append(seconds / run.seconds)
        cell.wholes.append(whole / run.whole)


def arms_of(model: LanguageModel) -> dict[str, dict[str, Any]]:
    """Every way to draft that is loaded, one by one, and the choice between them."""
    names = [*(name for name in NAMED_ARMS if name in model.engine.drafters), "auto"]
    return {name: {"draft": name} for name in names}
