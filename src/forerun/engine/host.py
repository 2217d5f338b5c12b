"""Rounds that the host runs: draft, one target pass, choose. Plain decoding is depth 0, and a stretch of a prompt is
rows like any other where the kernels have one kind of row.

Nothing here changes a sequence: what a round gave is kept or forgotten when the engine delivers it. So whatever is
raised on the way, the round has not happened.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from forerun.engine.constrained import constrain, shorten
from forerun.engine.drafters import Drafters
from forerun.engine.interrupts import interrupts_let_through
from forerun.engine.plan import GoesOn, Result, Round, Turn
from forerun.engine.sequence import Logprob, Sequence
from forerun.errors import ForerunError
from forerun.models.layers.rows import Output, Pass, Target, make_pass
from forerun.policy.costs import CostTable, RoundTime
from forerun.progress import Progress
from forerun.sample.acceptance import accept_coupled, accept_rejection
from forerun.sample.choose import choose, probabilities
from forerun.sample.logprobs import log_probabilities
from forerun.sample.row import RowError

PROMPT_ROWS = 16  # whose logits are there at once: as many as a round may have, whose bits were probed


class HostExecutor:
    """Runs a round at once; what a device runs ahead overrides it (`engine/device.py`)."""

    runs_ahead = False  # does a round go on while the one before is delivered?
    uniform = False  # have all sequences of a pass as many rows as the one with most?
    batch_arm: str | None = None  # that drafts for whole batches where rows are uniform; None: each has its own

    def __init__(
        self, target: Target, drafters: Drafters, costs: CostTable, restartable: bool = True, mixes: bool = False
    ) -> None:
        """`restartable`: a pass that failed half-way may be run again; `mixes`: rows of prompts may be in any pass."""
        self.target, self.drafters, self.costs = target, drafters, costs
        self.restartable, self.mixes = restartable, mixes

    def costs_of(self, sequences: list[Sequence]) -> CostTable:  # noqa: ARG002
        """What rounds of such sequences cost."""
        return self.costs

    def start(self, work: Round) -> None:
        """Start a round. What it raises leaves every sequence as it was, or ended with an error."""
        if self.mixes or not work.turns:
            self.run(work, work.turns, work.prompts, work.began)
            return
        self.read_apart(work)
        self.run(work, work.turns, [], work.ended if work.read else work.began)

    def read_apart(self, work: Round) -> None:
        """Prompts whose rows are of another kind, each in a pass of its own."""
        for turn in work.prompts:
            self.run(work, [], [turn], time.perf_counter())
        work.ended = time.perf_counter()

    def finish(self, work: Round, again: GoesOn | None) -> None:
        """Wait for it. Where `again` agrees to all its turns, an executor may start the same ones at once."""

    def prepare(self, widest: int, filtered: bool, progress: Progress, batch: int = 1) -> list[RoundTime]:  # noqa: ARG002
        """Get ready for whatever one sequence may want, at most `widest` rows, and for batches of up to so many.

        Returns what rounds cost, where measured.
        """
        return []

    def forget(self, sequence: Sequence) -> None:
        """A sequence leaves for good or for a while: it holds nothing of the executor's any more."""

    def run(self, work: Round, turns: list[Turn], prompts: list[Turn], began: float) -> None:
        """The host's part of a round: these sequences, in one pass. `began`: when deciding on it did."""
        self.drafters.propose(turns)
        drafting = time.perf_counter() - began
        every = [*turns, *prompts]
        for turn in every:
            if turn.width:
                constrain(turn)
        sound = [turn for turn in every if turn.error is None]
        passed = {id(result.turn): result for result in (self._pass(sound) if sound else ())}
        results = [passed.get(id(turn)) or failed(turn, turn.error or AssertionError()) for turn in every]
        work.ended = time.perf_counter()
        took = work.ended - began
        for result in results:
            result.seconds, result.took, result.drafting = took, took, drafting
        work.results += results[: len(turns)]
        work.read += results[len(turns) :]
        if prompts:
            work.typical = work.typical and not turns  # what the rows of prompts took is not told from the rest
        elif sound:
            measured = RoundTime(len(sound), sum(turn.width for turn in sound), took - drafting)
            if len(turns) == 1:  # what a drafter costs is known only when it drafted for one
                measured.drafter, measured.drafted = turns[0].asked, turns[0].proposed
                measured.drafting = drafting
            work.times.append((self.costs, measured))

    def _pass(self, turns: list[Turn]) -> list[Result]:
        """The target pass over all rows of all sequences, and what it gave each."""
        reading = any(turn.is_prompt for turn in turns)
        try:
            with interrupts_let_through() if reading else nullcontext():  # a long prompt takes seconds
                output = self.target.forward(self._rows(turns, reading))
        except Exception as error:  # noqa: BLE001 - nobody knows whose fault it was: find out, or end them all
            if len(turns) > 1 and self.restartable:
                return [result for turn in turns for result in self._pass([turn])]
            return [failed(turn, error) for turn in turns]
        choosing = [turn for turn in turns if turn.width]
        verified = {id(result.turn): result for result in self._verify(choosing, output)} if choosing else {}
        return [verified.get(id(turn)) or self._read(turn, output) for turn in turns]

    def _rows(self, turns: list[Turn], reading: bool) -> Pass:
        """The rows of a pass. Where it reads prompts, only some have logits."""
        work = [(turn.sequence.cache, turn.tokens) for turn in turns]
        features = any(self.drafters.wants_features(t.sequence) or t.sequence.request.prompt_logprobs for t in turns)
        media = [turn.sequence.request.media if turn.is_prompt else None for turn in turns]
        prefill = reading and not self.mixes
        wanted = [1] if prefill else [turn.width for turn in turns] if reading else None
        batch = make_pass(work, wanted=wanted, prefill=prefill, features=features, media=media if any(media) else ())
        logits = 0
        for index, turn in enumerate(turns):
            turn.start, turn.first_logits = batch.start(index), logits if reading else batch.start(index)
            logits += turn.width
        return batch

    def _read(self, turn: Turn, output: Output) -> Result:
        """A stretch of a prompt that does not end it."""
        result = Result(turn, [], 0, 0, partial(self._keep_prompt, turn, output), advanced=not self.restartable)
        return self._with_logprobs(result, output)

    def _keep_prompt(self, turn: Turn, output: Output, _: int) -> None:
        """All its rows; drafters see what the target computed there."""
        sequence = turn.sequence
        rows = slice(turn.start, turn.start + turn.stop - sequence.cache.length)
        sequence.cache.commit(rows.stop - rows.start)
        self.drafters.feed(sequence, None if output.features is None else output.features[rows])
        if sequence.cache.length == sequence.prompt_length:
            self.drafters.announce(sequence)

    def _verify(self, turns: list[Turn], output: Output) -> list[Result]:
        """What each sequence emits. One that cannot go on fails alone."""
        try:
            checked = self._check(turns, output)
        except Exception as error:  # noqa: BLE001 - one of them has no token left to choose, or worse: find out which
            if len(turns) == 1:
                if isinstance(error, RowError) and error.row:
                    shorten(turns[0], error.row - 1)  # plain decoding may never come to that row
                    return self._verify(turns, output)
                return [failed(turns[0], error)]
            return [result for turn in turns for result in self._verify([turn], output)]
        results = []
        for turn, (accepted, final) in zip(turns, checked, strict=True):
            keep = partial(self._keep_prompt if turn.is_prompt else self._keep, turn, output)
            tokens = [*turn.draft.tokens[:accepted], final]
            result = Result(turn, tokens, accepted, turn.drafted, keep, advanced=not self.restartable)
            results.append(self._with_logprobs(result, output))
        return results

    def _with_logprobs(self, result: Result, output: Output) -> Result:
        """With the log probabilities that its request asks for. Where they fail, its sequence fails alone."""
        turn, vocab = result.turn, self.drafters.vocab
        request, cache = turn.sequence.request, turn.sequence.cache
        try:
            if request.logprobs is not None and result.tokens:
                logits = output.logits[turn.first_logits :]
                result.logprobs = logprobs_of(logits, result.tokens, request.logprobs, vocab)
            if turn.is_prompt and request.prompt_logprobs:
                assert output.features is not None
                rows = output.features[turn.start : turn.start + turn.stop - cache.length]
                after = list(request.prompt[cache.length + 1 : turn.stop + 1])
                result.prompt_logprobs = prompt_logprobs(self.target, rows, after, request.logprobs or 0, vocab)
        except Exception as error:  # noqa: BLE001 - of these rows alone
            result.error = error
        return result

    def _check(self, turns: list[Turn], output: Output) -> list[tuple[int, int]]:
        """Accepted drafts and the token after them: one vectorised choice for all who compare with it."""
        coupled = [turn for turn in turns if turn.sequence.request.accept == "coupled"]
        found: dict[int, tuple[int, int]] = {}
        if coupled:
            index = [turn.first_logits + row for turn in coupled for row in range(turn.width)]
            logits = output.logits if len(index) == len(output.logits) else output.logits[index]
            tokens = choose(logits, [row for turn in coupled for row in turn.rows()], self.drafters.vocab)
            offset = 0
            for turn in coupled:
                found[id(turn)] = accept_coupled(tokens[offset : offset + turn.width], turn.draft.tokens)
                offset += turn.width
        return [found[id(turn)] if id(turn) in found else self._reject(turn, output) for turn in turns]

    def _reject(self, turn: Turn, output: Output) -> tuple[int, int]:
        """Rejection sampling: exact in distribution."""
        logits = output.logits[turn.first_logits : turn.first_logits + turn.width]
        rows, q, vocab, bad = turn.rows(), turn.draft.probabilities, self.drafters.vocab, None
        try:
            p = probabilities(logits, rows, vocab)
        except RowError as error:  # of a row that may never be reached
            bad, p = error, torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
            p[:, 0] = 1.0
            p[: error.row] = probabilities(logits[: error.row], rows[: error.row], vocab)
        if q is not None and q.shape[1] != p.shape[1]:  # a drafter need not know ids that nobody may choose
            q = torch.nn.functional.pad(q, (0, p.shape[1] - q.shape[1]))
        found = accept_rejection(p, turn.draft.tokens, q, turn.sequence.request.sampling, len(turn.sequence.tokens))
        if bad is not None and found[0] >= bad.row:
            if not bad.row:
                raise ForerunError(str(bad))
            return bad.row - 1, turn.draft.tokens[bad.row - 1]  # accepted: it ends the round
        return found

    def _keep(self, turn: Turn, output: Output, count: int) -> None:
        """The rows of tokens that were emitted before the last; drafters see what the target computed there."""
        turn.sequence.cache.commit(count)
        rows = slice(turn.start, turn.start + count)
        self.drafters.feed(turn.sequence, None if output.features is None else output.features[rows])


def failed(turn: Turn, error: Exception) -> Result:
    """A sequence that cannot go on."""
    return Result(turn, [], 0, len(turn.draft.tokens), lambda _: None, error=error)


def logprobs_of(logits: Tensor, tokens: list[int], top: int, vocab: int) -> list[Logprob]:
    """Of one token for each of the first rows of `logits` [rows, V]."""
    rows = logits[: len(tokens)].float().cpu().numpy()
    return [Logprob(*log_probabilities(row, token, top, vocab)) for row, token in zip(rows, tokens, strict=True)]


def prompt_logprobs(target: Target, features: Tensor, tokens: list[int], top: int, vocab: int) -> list[Logprob]:
    """Of the token after each of the first rows with these features [rows, …]; the logits of a few at a time."""
    found: list[Logprob] = []
    for start in range(0, len(tokens), PROMPT_ROWS):
        some = tokens[start : start + PROMPT_ROWS]
        found += logprobs_of(target.logits(features[start : start + len(some)]), some, top, vocab)
    return found
