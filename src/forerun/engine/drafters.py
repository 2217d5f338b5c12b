"""The drafters of an engine, guarded: each may fail at any call. A failure is reported and costs speed only."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from operator import index

from forerun.cache.pages import PagePool
from forerun.draft.arms import ARMS, ASSISTANT, FORCED, MAX_DEPTH, MTP, SERVED, arm_for
from forerun.draft.protocol import Draft, Drafter, RowDrafter, TextDrafter, Want, is_row_drafter
from forerun.engine.constrained import force
from forerun.engine.plan import NOTHING, Turn
from forerun.engine.request import Request
from forerun.engine.sequence import Followed, Sequence
from forerun.errors import ForerunError
from forerun.policy.decision import PLAIN, Decision
from forerun.sample.row import Row

log = logging.getLogger("forerun")
ROUNDS = 200  # of a drafter, after which it is time to look how often it was right
LEAST = 0.02  # of the drafts that must have been accepted by then


class Drafters:
    """By name. A sequence may use those in its `arms`; `told` and `followed` say how far each of them has come."""

    def __init__(
        self, drafters: Mapping[str, Drafter], pool: PagePool, vocab: int, unavailable: Mapping[str, str] | None = None
    ) -> None:
        """`unavailable`: why a drafter that a user may ask for is not among them."""
        self.vocab, self.unavailable, self._pool = vocab, dict(unavailable or {}), pool
        self.texts: dict[str, TextDrafter] = {n: d for n, d in drafters.items() if not is_row_drafter(d)}  # type: ignore[misc]
        self.rows: dict[str, RowDrafter] = {n: d for n, d in drafters.items() if is_row_drafter(d)}  # type: ignore[misc]
        for drafter in self.rows.values():
            drafter.attach(pool)

    @property
    def by_name(self) -> dict[str, Drafter]:
        return {**self.texts, **self.rows}

    def __contains__(self, name: str) -> bool:
        return name in self.texts or name in self.rows

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
        return any(self.rows[name].features for name in sequence.arms if name in self.rows)

    def deepest(self, sequence: Sequence, most: int) -> dict[str, int]:
        """The arms of a sequence, and how many drafts a round of each may have: at most so many."""
        names = sequence.arms if sequence.constraint is None else [*sequence.arms, FORCED.drafter]
        return {arm.name: min(arm.deepest, most) for name in names for arm in SERVED[name] if most > 0}

    def has_until(self, sequence: Sequence, name: str) -> int:
        """The first position whose entry is missing, of a row drafter that must have all of them."""
        entries = sequence.followed.get(name)
        if entries is None or entries.start > self.rows[name].first:
            return 0
        return sequence.cache.length if entries.stop is None else min(entries.stop, sequence.cache.length)

    def most(self, sequence: Sequence, name: str) -> int:
        """Drafts that a row drafter may make now: none where it lacks what it needs for the next token."""
        drafter, cache = self.rows[name], sequence.cache
        if drafter.features and cache.edge is None:
            return 0
        room = MAX_DEPTH if drafter.longest is None else max(0, drafter.longest - len(sequence.tokens))
        if not drafter.specs:
            return room
        if drafter.warm is None:  # it catches up, unless what it has missed lies in pages that were given back
            groups = {layer.group for layer in self._pool.parts[name]}
            return room if cache.still_sees(self.has_until(sequence, name), groups) else 0
        entries = sequence.followed.get(name)
        if entries is None or (entries.start > drafter.first and cache.length - entries.start < drafter.warm):
            return 0
        return room

    def available(self, sequence: Sequence) -> dict[str, int]:
        """How many drafts each text arm may have now."""
        request, forced = sequence.request, len(self._forced(sequence, FORCED.deepest))
        found: dict[str, int] = {} if sequence.constraint is None else {FORCED.name: forced}
        # In rounds of an arm that a user names, what is forced comes first, whether its drafter has a draft or not.
        least = 0 if request.draft == "auto" and request.draft_tokens is None else forced
        for name in [name for name in sequence.arms if name in self.texts]:
            with self.guarded(sequence, name):
                fitting = arm_for(name, self._tell(sequence, name).ready(sequence.id))
                found |= {arm.name: arm.deepest if arm is fitting else least for arm in SERVED[name]}
        return found

    def peek(self, sequence: Sequence, but: str | None, depth: int) -> list[tuple[str, list[int]]]:
        """Arms and drafts that cost nothing, of drafters other than `but`."""
        found = []
        if but != FORCED.drafter and (forced := self._forced(sequence, depth)):
            found.append((FORCED.name, forced))
        for name in [name for name in sequence.arms if name in self.texts and name != but]:
            with self.guarded(sequence, name):
                drafter = self._tell(sequence, name)
                fitting = arm_for(name, drafter.ready(sequence.id))
                if fitting is not None and (tokens := drafter.peek(sequence.id, depth)):
                    found.append((fitting.name, tokens))
        return found

    def _tell(self, sequence: Sequence, name: str) -> TextDrafter:
        """Open the sequence, or tell what was committed since. Not guarded: a failure is the caller's failure too."""
        drafter, told = self.texts[name], sequence.told.get(name)
        if told is None:
            told = sequence.prompt_length
            drafter.open(sequence.id, sequence.tokens[:told])
        if told < len(sequence.tokens):
            drafter.observe(sequence.id, sequence.tokens[told:])
        sequence.told[name] = len(sequence.tokens)
        return drafter

    def forced(self, sequence: Sequence, most: int) -> Decision:
        """To draft what its constraint leaves no choice about; plain decoding where there is a choice."""
        count = min(most, len(self._forced(sequence, most)))
        return Decision(FORCED.name, count) if count else PLAIN

    def _forced(self, sequence: Sequence, most: int) -> list[int]:
        """What its constraint leaves no choice about."""
        try:
            return [] if sequence.constraint is None else sequence.constraint.forced(most)
        except Exception:  # noqa: BLE001 - the next round meets it again and ends the sequence
            return []

    def propose(self, turns: list[Turn]) -> list[Turn]:
        """Ask text drafters for the drafts of their turns; what is forced needs no drafter.

        Returns the turns whose drafts a row drafter makes.
        """
        turns = [turn for turn in turns if turn.decision.depth and not force(turn)]
        for name, drafter in self.texts.items():
            wants: list[tuple[Turn, Want]] = []
            for turn in turns:
                if turn.decision.drafter == name:
                    with self.guarded(turn.sequence, name):
                        self._tell(turn.sequence, name)
                        wants.append((turn, want_of(turn)))
            if wants:
                self._propose(drafter, wants)
        return [turn for turn in turns if turn.decision.drafter in self.rows]

    def _propose(self, drafter: TextDrafter, wants: list[tuple[Turn, Want]]) -> None:
        try:
            drafts = drafter.propose([want for _, want in wants])
            assert len(drafts) == len(wants), "a drafter answers every want"
            drafts = [sensible(draft, want.depth, self.vocab) for draft, (_, want) in zip(drafts, wants, strict=True)]
        except Exception as error:  # noqa: BLE001 - the wants are tried one by one to find whose fault it was
            if len(wants) > 1:
                for one in wants:
                    self._propose(drafter, [one])
            else:
                self.switch_off(wants[0][0].sequence, drafter.name, error)
            return
        for (turn, _), draft in zip(wants, drafts, strict=True):
            turn.draft = draft

    def found(self, sequence: Sequence) -> None:
        """Entries came with the pages that a prompt begins with."""
        for name, start in sequence.cache.entries().items():
            if name in self.rows:
                sequence.followed[name] = Followed(max(start, self.rows[name].first))

    def entries(self, sequence: Sequence) -> dict[str, tuple[int, int | None]]:
        """Row drafters, and where the run of their true entries begins and ends: None, with what is kept."""
        if not sequence.followed:
            return {}
        return {
            name: (0 if entries.start <= self.rows[name].first else entries.start, entries.stop)
            for name, entries in sequence.followed.items()
        }

    def follow(self, sequence: Sequence, names: frozenset[str], begin: int) -> None:
        """These row drafters write the entries of a turn whose first row stands at `begin`, and no others do."""
        if not names and not sequence.followed:
            return
        for name in [name for name, entries in sequence.followed.items() if entries.stop is None and name not in names]:
            del sequence.followed[name]
        for name in names:
            drafter, entries = self.rows[name], sequence.followed.get(name)
            if entries is not None and entries.stop is not None and entries.stop >= begin:
                entries.stop = None  # it had caught up
            elif entries is None or entries.stop is not None:  # it missed some
                known = not drafter.features or sequence.cache.edge is not None or not begin
                sequence.followed[name] = Followed(max(begin if known else begin + 1, drafter.first))

    def reached(self, sequence: Sequence, name: str, stop: int) -> None:
        """A row drafter has all entries up to `stop`."""
        sequence.followed[name] = Followed(self.rows[name].first, stop)

    def switch_off(self, sequence: Sequence, name: str, error: Exception) -> None:
        """A drafter failed: say so once and go on without it."""
        reason = f"{type(error).__name__}: {error}"
        if name in sequence.arms:
            sequence.arms.remove(name)
        sequence.dropped.append(name)
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
        sequence.followed.pop(name, None)
        if name not in self.texts:
            return
        try:
            self.texts[name].close(sequence.id)
        except Exception as error:  # noqa: BLE001 - it is being left alone anyway
            about = {"request": sequence.request.name}
            log.warning("drafter %s failed to forget a request: %s", name, error, extra=about)


def want_of(turn: Turn) -> Want:
    """What a turn asks of its drafter."""
    sequence, request = turn.sequence, turn.sequence.request
    row = Row(request.sampling, sequence.history, (), len(sequence.tokens), None)
    return Want(sequence.id, turn.decision.depth, row, request.accept == "rejection")


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
    """Counts the rounds of each drafter over all sequences: one that is never right, a mismatched pair above all, is
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
