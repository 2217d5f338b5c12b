"""The lookup drafter: when the end of the text occurred before, propose what followed it then.

It needs no model and no training, and shines where an answer repeats its prompt: edits, quotes, code, tables, loops.
"""

from __future__ import annotations

from forerun.draft.automaton import SuffixAutomaton
from forerun.draft.protocol import Draft, TextDrafter, Want
from forerun.errors import ForerunError


class Lookup(TextDrafter):
    """Drafts by copying after the longest suffix that occurred before, when it has at least `minimum_match` tokens.

    Drafts are deterministic, so their probabilities are None (one-hot). `open` indexes the prompt at once; committed
    tokens wait in a queue and are indexed when the sequence next asks for a draft: rounds of other arms pay nothing.

    >>> lookup = Lookup()
    >>> lookup.open(7, [1, 2, 3, 4, 1, 2])
    >>> lookup.draft(7, depth=3)
    [3, 4, 1]
    """

    name = "lookup"

    def __init__(self, minimum_match: int = 2) -> None:
        if minimum_match < 1:
            raise ForerunError(f"lookup needs a minimum match of at least 1 token, not {minimum_match}")
        self._minimum_match = minimum_match
        self._automata: dict[int, SuffixAutomaton] = {}
        self._queued: dict[int, list[int]] = {}

    def open(self, sequence_id: int, tokens: list[int]) -> None:
        """Indexes the prompt."""
        self._automata[sequence_id] = SuffixAutomaton(tokens)
        self._queued[sequence_id] = []

    def observe(self, sequence_id: int, tokens: list[int]) -> None:
        """Queues committed tokens."""
        self._queued[sequence_id].extend(tokens)

    def propose(self, wants: list[Want]) -> list[Draft]:
        """One draft per want, empty where the end of the text has no earlier twin."""
        return [Draft(self.draft(want.sequence_id, want.depth), None) for want in wants]

    def ready(self, sequence_id: int) -> int:
        """How long an earlier twin the end of the text has; 0 when it is too short to count."""
        length = self._catch_up(sequence_id).match.length
        return length if length >= self._minimum_match else 0

    def peek(self, sequence_id: int, depth: int) -> list[int]:
        """What it would draft: copying costs nothing."""
        return self.draft(sequence_id, depth)

    def close(self, sequence_id: int) -> None:
        """Forgets the sequence."""
        self._automata.pop(sequence_id, None)
        self._queued.pop(sequence_id, None)

    def draft(self, sequence_id: int, depth: int) -> list[int]:
        """Up to `depth` tokens for one sequence: all of them when there is a match, else none."""
        automaton = self._catch_up(sequence_id)
        length, end = automaton.match
        if length < self._minimum_match or depth < 1:
            return []
        return _copy_after(automaton, end, depth)

    def _catch_up(self, sequence_id: int) -> SuffixAutomaton:
        automaton = self._automata[sequence_id]
        queued = self._queued[sequence_id]
        for token in queued:
            automaton.extend(token)
        queued.clear()
        return automaton


def _copy_after(automaton: SuffixAutomaton, end: int, depth: int) -> list[int]:
    """The `depth` tokens after index `end`; past the end of the text the copy reads what it has itself copied.

    So a text that loops is drafted to full depth however short the loop is.
    """
    drafted = automaton.tokens[end + 1 : end + 1 + depth].tolist()
    for index in range(depth - len(drafted)):
        drafted.append(drafted[index])
    return drafted
