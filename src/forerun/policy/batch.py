"""Whether a batch drafts at all: by its seconds per token, measured with and without, for each size of batch.

What a round of many sequences is worth cannot be told from its parts: deciding, joining, leaving and what drafters do
with prompts take time too. So both ways are timed, the better one is used for everybody at once, and the other is
looked at again now and then. Rounds in which somebody came or went are timed apart: there is a number of them for
each answer, however fast it is decoded.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from forerun.policy.costs import Average, batch_class

FIRST_LOOK, LOOK = 16, 24  # rounds that are timed before the ways are compared, and in later looks at the losing one
CLEAR, CLEARLY = 6, 1.15  # rounds after which a look ends early if the way looked at takes this much longer for a token
FIRST_GAP, LAST_GAP = 512, 8192  # rounds between such looks, or more where a look lost much
LOOKING = 0.01  # of the time may be lost to looks: drafters read the prompts of whoever joins before and during one
SOON = 32  # rounds before a look at drafting from which on drafters read prompts again
PATIENCE = 512  # rounds that a look waits for batches that can draft
LEAD = 1.02  # drafting must bring this much more than plain decoding
NEAR = 0.9  # of the better rate: worth another look soon
USUAL_ANSWER = 200.0  # tokens, until answers were seen
OLD = 0.998  # weight of the answers before when one more ends: batches of many may end at once
ENOUGH = 0.5  # of the sequences must be able to draft; else the round is a plain one


@dataclass(slots=True)
class Way:
    """Plain rounds, or drafting ones."""

    tokens: Average = field(default_factory=Average)  # of a round
    calm: Average = field(default_factory=Average)  # seconds of a round like the one before it
    busy: Average = field(default_factory=Average)  # seconds of a round in which somebody came or went

    def add(self, tokens: int, seconds: float, busy: bool) -> None:
        """One round."""
        self.tokens.add(tokens)
        (self.busy if busy else self.calm).add(seconds)

    def seconds_per_token(self, busy_per_token: float) -> float:
        """When there must be so many busy rounds for a token."""
        calm, busy = self.calm.value or self.busy.value, self.busy.value or self.calm.value
        return busy_per_token * busy + max(0.0, 1 / self.tokens.value - busy_per_token) * calm


@dataclass(slots=True)
class Record:
    """Batches of about the same size."""

    ways: dict[bool, Way] = field(default_factory=lambda: {False: Way(), True: Way()})  # by: do they draft?
    drafting: bool = False  # the way in use
    look: int = FIRST_LOOK  # rounds of it to time before the ways are compared; 0: they have been
    rest: int = 0  # rounds until the other way is looked at
    gap: int = FIRST_GAP  # between looks
    # Of the look under way, from when drafters began to read prompts for it:
    rounds: int = 0
    seconds: float = 0.0
    tokens: int = 0

    @property
    def compared(self) -> bool:
        return self.look == 0

    @property
    def prepares(self) -> bool:
        """Do drafters read prompts for a look at drafting that comes soon?"""
        return self.compared and not self.drafting and self.rest <= SOON

    def end_look(self, best: float) -> None:
        """The next one comes after the gap, or later where this one lost much. `best`: seconds of a token."""
        lost, round_seconds = self.seconds - best * self.tokens, best * self.ways[self.drafting].tokens.value
        self.rest = self.gap
        if round_seconds > 0:  # a coarse clock may see no time in any round
            self.rest = max(self.gap, round(lost / (LOOKING * round_seconds)))
        self.look, self.rounds, self.seconds, self.tokens = 0, 0, 0.0, 0


class BatchPolicy:
    """One for an engine."""

    def __init__(self) -> None:
        self._records: defaultdict[int, Record] = defaultdict(Record)  # by size
        # Of the answers that ended lately: their tokens, and the rounds in which somebody came or went. Sums, since of
        # answers that end together one alone is told of the rounds of all.
        self._tokens, self._busy = USUAL_ANSWER, 2.0
        self._busy_rounds = 0  # since an answer ended
        # Of the last round: who took part, when it ended, and how long drafters then read prompts.
        self._last: tuple[list[int], float, float] = [], 0.0, 0.0

    def drafts(self, able: int, sequences: int) -> bool:
        """Does a round of so many sequences draft, of which `able` could? Asking changes nothing."""
        return able >= ENOUGH * sequences and self._record(sequences).drafting

    def admits(self, sequences: int) -> bool:
        """Shall drafters read the prompt of one more sequence, the last of so many?"""
        record = self._record(sequences)
        return record.drafting or not record.compared or record.prepares

    def has_chosen_drafting(self, sequences: int) -> bool:
        """Is it known that a round of so many drafts? One alone always may."""
        record = self._record(sequences)
        return sequences == 1 or (record.compared and record.drafting)

    def plain_seconds(self, sequences: int) -> float:
        """Of a plain round of so many when nobody comes or goes; 0: not measured."""
        return self._record(sequences).ways[False].calm.value

    @property
    def _busy_per_token(self) -> float:
        """Rounds in which somebody came or went, for each token of the answers."""
        return self._busy / max(1.0, self._tokens)

    def has_ended(self, tokens: int) -> None:
        """An answer had so many tokens."""
        self._tokens = OLD * self._tokens + tokens
        self._busy = OLD * self._busy + self._busy_rounds
        self._busy_rounds = 0

    def delivered(
        self, who: list[int], ended: float, tokens: int, drafted: bool, prompts: bool, typical: bool, reading: float
    ) -> None:
        """A round of these sequences. `prompts`: some were read beside it; `typical`: nothing was captured for it.

        `reading`: seconds after its end in which drafters read those prompts. A batch that never drafts would not
        have them, so they are no part of the plain round that follows.
        """
        (before, last, spent), self._last = self._last, (who, ended, reading)
        busy = prompts or who != before
        self._busy_rounds += busy
        if len(who) > 1 and before:
            self.learn(len(who), drafted, tokens, ended - last if typical else None, busy, spent)

    def learn(
        self, sequences: int, drafted: bool, tokens: int, seconds: float | None, busy: bool, reading: float
    ) -> None:
        """A round. `seconds`: since the end of the one before; None where that tells nothing. `reading`: part of it."""
        record = self._record(sequences)
        if record.prepares or not record.compared:
            record.rounds += 1
            if seconds is not None:
                record.seconds, record.tokens = record.seconds + seconds, record.tokens + tokens
        if seconds is not None and tokens and drafted == record.drafting and not record.prepares:
            record.ways[drafted].add(tokens, seconds if drafted else seconds - reading, busy)
            record.look -= not record.compared
            if record.rounds and (record.compared or self._loses_clearly(record)):
                self._compare(record)
                return
        if record.compared:
            record.rest -= 1
            if record.rest <= 0:
                record.drafting, record.look = not record.drafting, LOOK
                record.ways[record.drafting] = Way()  # what it was worth long ago does not count
        elif record.drafting and record.rounds > PATIENCE:  # too few can draft
            record.drafting, record.gap = False, min(LAST_GAP, 2 * record.gap)
            record.end_look(record.ways[False].seconds_per_token(self._busy_per_token))

    def _loses_clearly(self, record: Record) -> bool:
        """Has the way that is looked at taken so much longer that more rounds of it would only cost?"""
        way, other = record.ways[record.drafting], record.ways[not record.drafting]
        if way.tokens.count < CLEAR or not other.tokens.count:
            return False
        often = self._busy_per_token
        return way.seconds_per_token(often) > CLEARLY * other.seconds_per_token(often)

    def _compare(self, record: Record) -> None:
        """Use the better way from now on; the other one is looked at sooner when it came near."""
        looked_at, other = record.drafting, record.ways[not record.drafting]
        if not other.tokens.count:  # there is nothing yet to compare with
            record.drafting, record.look = not looked_at, FIRST_LOOK
            return
        plain, drafting = (record.ways[way].seconds_per_token(self._busy_per_token) for way in (False, True))
        record.drafting = LEAD * drafting < plain
        if record.drafting == looked_at:
            record.gap = FIRST_GAP  # it has just won
        elif min(plain, drafting) > NEAR * max(plain, drafting):
            record.gap = max(FIRST_GAP, record.gap // 2)
        else:
            record.gap = min(LAST_GAP, 2 * record.gap)
        record.end_look(min(plain, drafting))

    def _record(self, sequences: int) -> Record:
        return self._records[batch_class(sequences)]
