"""A suffix automaton over a growing token sequence: where did the end of the text occur before?

After each `extend` the automaton knows the longest suffix of the sequence that also occurs earlier in it, for free:
that suffix is the longest string of the state the newest state's suffix link points to.

Cost. Building is the online construction: amortised O(1) automaton steps per token, at most 2n states and 3n edges.
Nearly all states have one outgoing edge, so edges live in two flat arrays, and only branching states own a dictionary.

Which earlier occurrence. Keeping the most recent one exact for every state would cost the length of the suffix-link
chain per token. Instead each token refreshes only the `REFRESHED_STATES` longest states of that chain. The occurrence
reported is therefore always a real, strictly earlier one; it is the most recent one unless the suffix sat deeper in the
chain when it last occurred, and then it may be an older one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

REFRESHED_STATES = 8
_ROOT = 0
_NONE = -1


class Match(NamedTuple):
    """The longest suffix that occurred before: its length, and the index of the last token of an earlier occurrence."""

    length: int
    end: int


NO_MATCH = Match(0, _NONE)


class SuffixAutomaton:
    """Extends token by token; `match` is the longest repeated suffix of `tokens`.

    >>> automaton = SuffixAutomaton([1, 2, 3, 9, 1, 2])
    >>> automaton.match
    Match(length=2, end=1)
    >>> automaton.tokens[automaton.match.end + 1]
    3
    """

    __slots__ = ("_branches", "_edge_target", "_edge_token", "_last", "_length", "_link", "_recent", "match", "tokens")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = array("i")
        self.match = NO_MATCH
        # One entry per state: longest string, suffix link, end of a recent occurrence, first edge out.
        self._length = array("i", [0])
        self._link = array("i", [_NONE])
        self._recent = array("i", [_NONE])
        self._edge_token = array("i", [_NONE])
        self._edge_target = array("i", [_NONE])
        # The further edges of states that have more than one: state -> token -> state.
        self._branches: dict[int, dict[int, int]] = {}
        self._last = _ROOT
        for token in tokens:
            self.extend(token)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, token: int) -> None:
        """Appends one token and updates `match`. Amortised constant time."""
        position = len(self.tokens)
        self.tokens.append(token)
        newest = self._add_state(position + 1, position, _NONE, _NONE)
        state, target = self._connect(token, newest)
        if target == _NONE:
            link = _ROOT
        elif self._length[target] == self._length[state] + 1:
            link = target
        else:
            link = self._split(state, token, target)
        self._link[newest] = link
        self._last = newest
        self._note_occurrence(link, position)

    def _add_state(self, length: int, recent: int, edge_token: int, edge_target: int) -> int:
        self._length.append(length)
        self._link.append(_NONE)
        self._recent.append(recent)
        self._edge_token.append(edge_token)
        self._edge_target.append(edge_target)
        return len(self._length) - 1

    def _connect(self, token: int, newest: int) -> tuple[int, int]:
        """Adds the missing edges to `newest`; returns the longest suffix that has this edge already, and its target."""
        edge_token, edge_target, branches, link = self._edge_token, self._edge_target, self._branches, self._link
        state = self._last
        while state != _NONE:
            only = edge_token[state]
            if only == token:
                return state, edge_target[state]
            if only == _NONE:
                edge_token[state] = token
                edge_target[state] = newest
            else:
                others = branches.get(state)
                if others is None:
                    branches[state] = {token: newest}
                else:
                    target = others.get(token, _NONE)
                    if target != _NONE:
                        return state, target
                    others[token] = newest
            state = link[state]
        return _NONE, _NONE

    def _split(self, state: int, token: int, target: int) -> int:
        """Gives the strings of `target` that end here too a state of their own, and returns it."""
        clone = self._add_state(
            self._length[state] + 1, self._recent[target], self._edge_token[target], self._edge_target[target]
        )
        if target in self._branches:
            self._branches[clone] = self._branches[target].copy()
        self._link[clone] = self._link[target]
        self._link[target] = clone
        while state != _NONE:
            if self._edge_token[state] == token:
                if self._edge_target[state] != target:
                    break
                self._edge_target[state] = clone
            else:
                others = self._branches[state]
                if others[token] != target:
                    break
                others[token] = clone
            state = self._link[state]
        return clone

    def _note_occurrence(self, state: int, position: int) -> None:
        """Reads the match, then marks the longest matching suffixes as seen at `position`."""
        if state == _ROOT:
            self.match = NO_MATCH
            return
        recent, link = self._recent, self._link
        self.match = Match(self._length[state], recent[state])
        for _ in range(REFRESHED_STATES):
            if state == _ROOT:
                return
            recent[state] = position
            state = link[state]
