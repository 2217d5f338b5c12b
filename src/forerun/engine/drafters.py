"""The drafters of an engine, guarded: each may fail at any call. A failure is reported and costs speed only."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from operator import index

from torch import Tensor

from forerun.draft.arms import ARMS, ASSISTANT, FORCED, MTP, SERVED, arm_for
from forerun.draft.protocol import Draft, Drafter, Want
from forerun.engine.constrained import force
from forerun.engine.plan import NOTHING, Turn
from forerun.engine.request import Request
from forerun.engine.sequence import Sequence
from forerun.errors import ForerunError
from forerun.sample.row import Row

log = logging.getLogger("forerun")
ROUNDS = 200  # of a drafter, after which it is time to look how often it was right
LEAST = 0.02  # of the drafts that must have been accepted by then


class Drafters:
    """By name. A sequence may use those in its `arms`; the ones in its `told` follow it."""

    def __init__(self, drafters: dict[str, Drafter], vocab: int, unavailable: Mapping[str, str] | None = None) -> None:
        """`unavailable`: why a drafter that a user may ask for is not among them."""
        self.by_name, self.vocab, self.unavailable = drafters, vocab, dict(unavailable or {})

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    def arms_for(self, request: Request) -> list[str]:
        """Those that a request may use."""
        if request.draft == "off":
            return []
        if request.draft == "auto":
            names = [name for name in SERVED if name in self.by_name]
            return names if request.draft_tokens is None else names[:1]
        wanted = request.draft
        if wanted == MTP.drafter and wanted not in self.by_name and ASSISTANT.drafter in self.by_name:
            wanted = ASSISTANT.drafter  # what users of other engines call it
        if wanted not in self.by_name:
            reason = self.unavailable.get(wanted) or ARMS[wanted].hint
            raise ForerunError(f"no {wanted} drafter is loaded: {reason}")
        return [wanted]

    @contextmanager
    def guarded(self, sequence: Sequence, name: str) -> Iterator[None]:
        """A drafter that fails inside is switched off for this sequence."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a drafter is allowed to fail; it is reported and left out
            self.switch_off(sequence, name, error)

    def wants_features(self, sequence: Sequence) -> bool:
        """Does a drafter this sequence may use look inside the target?"""
        return any(self.by_name[name].wants_features for name in sequence.arms)

    def tell(self, sequence: Sequence, name: str) -> Drafter:
        """Open the sequence, or tell what was committed since. Not guarded: a failure is the caller's failure too."""
        drafter, told = self.by_name[name], sequence.told.get(name)
        if told is None:
            told = sequence.prompt_length
            drafter.open(sequence.id, sequence.tokens[:told], sequence.request.media)
        if told < len(sequence.tokens):
            drafter.observe(sequence.id, sequence.tokens[told:])
        sequence.told[name] = len(sequence.tokens)
        return drafter

    def leave_out(self, sequence: Sequence) -> None:
        """Its batch does not draft: whoever would have to read its prompt now is not among its drafters, for a while.

        The others, who read it when they are first asked, stay.
        """
        sequence.announced = False
        for name in [name for name in sequence.arms if self.by_name[name].wants_features]:
            sequence.policy.drop(name)
            sequence.arms.remove(name)
            sequence.left_out.append(name)

    def take_in(self, sequence: Sequence, most: int) -> None:
        """Whoever was left out follows the sequence from here on, without its prompt. `most`: see `deepest`."""
        names, sequence.left_out = sequence.left_out, []
        sequence.arms += names
        for name in names:
            with self.guarded(sequence, name):
                self.by_name[name].open_late(sequence.id, sequence.pending)
                sequence.told[name] = len(sequence.tokens)
        sequence.policy.give(self.deepest(sequence, most))

    def deepest(self, sequence: Sequence, most: int) -> dict[str, int]:
        """The arms of a sequence, and how many drafts a round of each may have: at most so many."""
        names = sequence.arms if sequence.constraint is None else [*sequence.arms, FORCED.drafter]
        return {arm.name: min(arm.deepest, most) for name in names for arm in SERVED[name] if most > 0}

    def announce(self, sequence: Sequence) -> None:
        """Tell everybody of the prompt. A device that still computes on it hides what they do with it."""
        for name in list(sequence.arms) if sequence.announced else ():
            with self.guarded(sequence, name):
                self.tell(sequence, name)

    def feed(self, sequence: Sequence, features: Tensor | None) -> None:
        """Hand over the features of committed rows to whoever wants them.

        The tokens come first: a drafter may want to work off its queue.
        """
        for name in list(sequence.arms):
            if self.by_name[name].wants_features:
                assert features is not None
                with self.guarded(sequence, name):
                    self.tell(sequence, name).feed(sequence.id, features)

    def available(self, sequence: Sequence) -> dict[str, int]:
        """How many drafts each arm may have now."""
        found: dict[str, int] = {}
        if sequence.constraint is not None:
            found[FORCED.name] = len(self._forced(sequence, FORCED.deepest))
        for name in list(sequence.arms):
            with self.guarded(sequence, name):
                fitting = arm_for(name, self.tell(sequence, name).ready(sequence.id))
                found |= {arm.name: arm.deepest if arm is fitting else 0 for arm in SERVED[name]}
        return found

    def peek(self, sequence: Sequence, but: str | None, depth: int) -> list[tuple[str, list[int]]]:
        """Arms and drafts that cost nothing, of drafters other than `but` that were told everything."""
        found = []
        if but != FORCED.drafter and (forced := self._forced(sequence, depth)):
            found.append((FORCED.name, forced))
        for name in list(sequence.told):
            drafter = self.by_name[name]
            if name == but or sequence.told[name] != len(sequence.tokens):
                continue
            with self.guarded(sequence, name):
                fitting = arm_for(name, drafter.ready(sequence.id))
                if fitting is not None and (tokens := drafter.peek(sequence.id, depth)):
                    found.append((fitting.name, tokens))
        return found

    def _forced(self, sequence: Sequence, most: int) -> list[int]:
        """What its constraint leaves no choice about."""
        try:
            return [] if sequence.constraint is None else sequence.constraint.forced(most)
        except Exception:  # noqa: BLE001 - the next round meets it again and ends the sequence
            return []

    def propose(self, turns: list[Turn]) -> None:
        """Ask each drafter once for all its sequences; what is forced needs no drafter."""
        turns = [turn for turn in turns if not force(turn)]
        for name, drafter in self.by_name.items():
            wants: list[tuple[Turn, Want]] = []
            for turn in turns:
                sequence, depth = turn.sequence, turn.decision.depth
                if turn.decision.drafter == name and depth > 0:
                    with self.guarded(sequence, name):
                        self.tell(sequence, name)
                        request = sequence.request
                        row = Row(request.sampling, sequence.history, (), len(sequence.tokens), None)
                        rejection = request.accept == "rejection"
                        wants.append((turn, Want(sequence.id, depth, row, rejection, sequence.cache)))
            if wants:
                self._propose(drafter, wants)

    def _propose(self, drafter: Drafter, wants: list[tuple[Turn, Want]]) -> None:
        try:
            drafts = drafter.propose([want for _, want in wants])
            assert len(drafts) == len(wants), "a drafter answers every want"
            drafts = [sensible(draft, want.depth, self.vocab) for draft, (_, want) in zip(drafts, wants, strict=True)]
        except Exception as error:  # noqa: BLE001 - nobody knows whose fault it was: ask for each alone
            if len(wants) > 1:
                for one in wants:
                    self._propose(drafter, [one])
            else:
                self.switch_off(wants[0][0].sequence, drafter.name, error)
            return
        for (turn, _), draft in zip(wants, drafts, strict=True):
            turn.draft = draft
            turn.asked, turn.proposed = drafter.name, len(turn.draft.tokens)

    def switch_off(self, sequence: Sequence, name: str, error: Exception) -> None:
        """A drafter failed: say so once and go on without it."""
        reason = f"{type(error).__name__}: {error}"
        sequence.policy.drop(name)
        if name in sequence.arms:
            sequence.arms.remove(name)
        self._close(sequence, name)
        sequence.warnings.append(f"drafter {name} failed and was switched off: {reason}")
        about = {"request": sequence.request.name}
        log.warning("drafter %s failed and was switched off for this request: %s", name, reason, extra=about)

    def close(self, sequence: Sequence) -> None:
        """The sequence is over, for those too who were interrupted while it was opened."""
        for name in self.by_name:
            self._close(sequence, name)

    def _close(self, sequence: Sequence, name: str) -> None:
        sequence.told.pop(name, None)
        try:
            self.by_name[name].close(sequence.id)
        except Exception as error:  # noqa: BLE001 - it is being left alone anyway
            about = {"request": sequence.request.name}
            log.warning("drafter %s failed to forget a request: %s", name, error, extra=about)


def sensible(draft: Draft, depth: int, vocab: int) -> Draft:
    """Cut a draft at the first token that is not one, and at the depth asked for. What makes no sense is refused."""
    tokens, probabilities = [index(token) for token in draft.tokens], draft.probabilities
    if probabilities is not None and len(probabilities) != len(tokens):
        raise ValueError(f"{len(probabilities)} distributions do not belong to {len(tokens)} drafts")
    tokens = list(takewhile(lambda token: 0 <= token < vocab, tokens[:depth]))
    if not tokens:
        return NOTHING
    return Draft(tokens, None if probabilities is None else probabilities[: len(tokens)])


class LowAcceptance:
    """Counts the rounds of each drafter, whoever's they are: one that is never right, a mismatched pair above all, is
    named once.
    """

    def __init__(self) -> None:
        self.warnings: list[str] = []  # one for each drafter that was found out
        self._counts: dict[str, tuple[int, int, int]] = {}  # rounds, drafted, accepted since the last look
        self._warned: set[str] = set()

    def note(self, drafter: str, drafted: int, accepted: int) -> None:
        """One round of one sequence that had drafts. Of those that broke a rule of its answer it must not be told."""
        rounds, drafts, right = self._counts.get(drafter, (0, 0, 0))
        rounds, drafts, right = rounds + 1, drafts + drafted, right + accepted
        self._counts[drafter] = (rounds, drafts, right) if rounds < ROUNDS else (0, 0, 0)
        if rounds >= ROUNDS and right < LEAST * drafts and drafter not in self._warned:
            self._warned.add(drafter)
            message = (
                f"drafter {drafter} is almost never right: {right} of {drafts} drafts accepted in {rounds} rounds. "
                "It costs time and brings nothing: does it belong to this model?"
            )
            self.warnings.append(message)
            log.warning("%s", message)
