"""How often drafts are accepted: on one sequence, position by position, and over earlier requests of the same kind."""

from __future__ import annotations

from forerun.draft.arms import ARMS

SLOW, FAST = 0.95, 0.7  # weight of what is known when a new observation comes in
BREAK = 0.45  # when the fast mean is this far from the slow one, the text has changed: forget all but the fast one
AFRESH = 4.0  # observations that it then counts for
FADE = 0.97  # weight of what is known of a position after a round that did not reach it
AGED = 3.0  # observations that all earlier ones count for when an arm is looked at again
ANCHOR = 2.0  # observations that earlier requests always count for: chance makes a sequence look better than it is
NEIGHBOUR = 5.0  # observations the position before counts for
PRIOR_WEIGHT = 4.0  # observations the prior counts for
GUESS_WEIGHT = 2.0  # observations that the guess of an arm counts for
KIND_WEIGHT = 6.0  # observations that all kinds together count for in the prior of one kind
CONTINUES = 0.97  # acceptance at an unseen position, relative to the one before it
OLD = 0.99  # weight of what earlier requests taught when a new round comes in


class Rate:
    """Acceptance at one position, given that all before it were accepted; follows changes of the text."""

    __slots__ = ("_fast", "_hits", "_prior", "_tries")

    def __init__(self, guess: float, weight: float) -> None:
        self._hits, self._tries, self._fast, self._prior = weight * guess, weight, guess, guess

    def add(self, hit: bool) -> None:
        """One observation."""
        self._hits = SLOW * self._hits + hit
        self._tries = SLOW * self._tries + 1
        self._fast = FAST * self._fast + (1 - FAST) * hit
        if abs(self._fast - self._hits / self._tries) > BREAK:
            self._hits, self._tries = AFRESH * self._fast, AFRESH

    def fade(self) -> None:
        """A round that did not reach this position: what is known grows old."""
        self._hits *= FADE
        self._tries *= FADE

    def age(self, weight: float) -> None:
        """What is known counts for no more than so many observations."""
        if self._tries > weight:
            self._hits, self._tries = self._hits * weight / self._tries, weight

    def own(self) -> float:
        """The expected rate from what was seen here; earlier requests always count for a little."""
        return (self._hits + ANCHOR * self._prior) / (self._tries + ANCHOR)

    def value(self, before: float) -> float:
        """The expected rate; `before`, that of the position before, counts for some observations too."""
        return (self._hits + NEIGHBOUR * before + ANCHOR * self._prior) / (self._tries + NEIGHBOUR + ANCHOR)


class Acceptance:
    """One arm on one sequence, position by position."""

    def __init__(self, prior: list[float], weight: float) -> None:
        """`prior`: expected acceptance per position; it counts for `weight` observations."""
        self._rates = [Rate(guess, weight) for guess in prior]

    def learn(self, drafted: int, accepted: int) -> None:
        """One round. Positions behind the first rejection were not observed."""
        observed = min(drafted, accepted + 1)
        while len(self._rates) < observed:
            self._rates.append(Rate(self._rates[-1].own(), NEIGHBOUR))
        for position, rate in enumerate(self._rates):
            if position < observed:
                rate.add(position < accepted)
            else:
                rate.fade()

    def age(self) -> None:
        """It was not used for long: the text may have changed."""
        for rate in self._rates:
            rate.age(AGED)

    def survival(self, depth: int) -> list[float]:
        """For each of `depth` drafts the chance that it and all before it are accepted: the tokens it should add."""
        rates, chances, survive = self._rates, [], 1.0
        rate = rates[0].own()
        for position in range(depth):
            if position:
                before = CONTINUES * rate
                rate = rates[position].value(before) if position < len(rates) else before
            survive *= rate
            chances.append(survive)
        return chances


class Priors:
    """What earlier requests taught about each arm, by kind of request and over all kinds."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str | None], list[tuple[float, float]]] = {}

    def acceptance(self, arm: str, kind: str) -> Acceptance:
        """What to expect of an arm on a new sequence: experience counts for more than a guess."""
        return Acceptance(self.rates(arm, kind), PRIOR_WEIGHT if (arm, None) in self._counts else GUESS_WEIGHT)

    def rates(self, arm: str, kind: str) -> list[float]:
        """Expected acceptance per position; a kind seen rarely leans on all of them."""
        guess = ARMS[arm].acceptance
        overall = self._counts.get((arm, None), [(0.0, 0.0)])
        own = self._counts.get((arm, kind), [])
        rates = []
        for position, (hits, tries) in enumerate(overall):
            general = (hits + GUESS_WEIGHT * guess) / (tries + GUESS_WEIGHT)
            mine, seen = own[position] if position < len(own) else (0.0, 0.0)
            rates.append((mine + KIND_WEIGHT * general) / (seen + KIND_WEIGHT))
        return rates

    def learn(self, arm: str, kind: str, drafted: int, accepted: int) -> None:
        """One round of any sequence of this kind."""
        for key in ((arm, kind), (arm, None)):
            counts = self._counts.setdefault(key, [])
            while len(counts) < drafted:
                counts.append((0.0, 0.0))
            for position in range(min(drafted, accepted + 1)):
                hits, tries = counts[position]
                counts[position] = (OLD * hits + (position < accepted), OLD * tries + 1)
