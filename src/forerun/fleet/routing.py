"""Which replica answers: who has the beginning of the prompt, then who has least to do. No Ray in here.

A prompt is known by the hashes of its blocks, each over everything before it too, as prefix caches have them. Where a
prefix is known to be comes from events of the caches, and as long as there are none from where prompts were sent. A
prompt that is new everywhere goes by rendezvous hashing of its session, or of its first block: every front sends it the
same way, and a replica that comes or goes moves only its own share.

The favourite has to be worth waiting for. It is compared with the less busy of two others, drawn at random, and loses
when it has `slack` more answers to make: a hot prefix spreads over as many replicas as it needs, which have it then.
"""

from __future__ import annotations

import random
from array import array
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from typing import Generic, Literal, Protocol, TypeVar, get_args

BLOCK = 64  # tokens
BLOCKS = 512  # of a prompt that are looked at: after so many, prompts of one kind have parted
KEPT = 200_000  # prefixes that are remembered, all replicas together
SLACK = 4  # answers more than another one: so much is a prefix worth

Policy = Literal["prefix", "queue", "round-robin"]
POLICIES: tuple[str, ...] = get_args(Policy)
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Route:
    """What is known of a request before it is sent anywhere."""

    chain: tuple[int, ...] = ()  # hashes of the whole blocks of its prompt, each with all before it
    session: str = ""  # what its client calls the conversation
    model: str = ""  # the fingerprint of the model that it is for

    @property
    def home(self) -> str:
        """Requests with the same one begin in the same place."""
        return self.session or (str(self.chain[0]) if self.chain else "")


def chain_of(tokens: Sequence[int]) -> tuple[int, ...]:
    """Hashes of the whole blocks.

    >>> one, two = chain_of([7] * 128), chain_of([7] * 64 + [8] * 64)
    >>> len(one), one[0] == two[0], one[1] == two[1]
    (2, True, False)
    """
    before, found = b"", []
    for block in range(min(len(tokens) // BLOCK, BLOCKS)):
        part = array("q", tokens[block * BLOCK : (block + 1) * BLOCK]).tobytes()
        before = blake2b(before + part, digest_size=8).digest()
        found.append(int.from_bytes(before, "big"))
    return tuple(found)


class Prefixes(Generic[Key]):
    """Which replicas have which blocks. The least recently used are forgotten."""

    def __init__(self, most: int = KEPT) -> None:
        self._most = most
        self._places: OrderedDict[int, set[Key]] = OrderedDict()

    def stored(self, replica: Key, blocks: Iterable[int]) -> None:
        """It has them now."""
        for block in blocks:
            self._places.setdefault(block, set()).add(replica)
            self._places.move_to_end(block)
        while len(self._places) > self._most:
            self._places.popitem(last=False)

    def removed(self, replica: Key, blocks: Iterable[int]) -> None:
        """It has them no longer."""
        for block in blocks:
            places = self._places.get(block)
            if places is not None:
                places.discard(replica)
                if not places:
                    del self._places[block]

    def keep(self, replicas: Iterable[Key]) -> None:
        """All others are gone, with all they had."""
        known = set(replicas)
        for block in [block for block, places in self._places.items() if not places <= known]:
            self._places[block] &= known
            if not self._places[block]:
                del self._places[block]

    def longest(self, chain: Sequence[int], among: Collection[Key]) -> set[Key]:
        """The replicas that have most of the chain's beginning; none, where no replica has any of it.

        A cache gives up the end of a prefix before its beginning: a replica that has a block has all before it.
        """
        for block in reversed(chain):
            here = {replica for replica in self._places.get(block, ()) if replica in among}
            if here:
                return here
        return set()


class Chooser(Protocol[Key]):
    """The one decision. `queues`: answers that each replica has to make, None where that is not known."""

    def choose(self, route: Route, queues: dict[Key, int | None]) -> Key: ...

    def sent(self, route: Route, replica: Key) -> None:
        """It was sent there."""
        ...


class ByPrefix(Generic[Key]):
    """The longest prefix first, then the shortest queue."""

    def __init__(self, seed: int | None = None, slack: int = SLACK) -> None:
        self.prefixes: Prefixes[Key] = Prefixes()  # events of prefix caches go here
        self._dice, self._slack = random.Random(seed), slack

    def choose(self, route: Route, queues: dict[Key, int | None]) -> Key:
        """A replica whose queue is not known is taken for an idle one."""
        replicas = list(queues)
        other = _shorter(self._dice, replicas, queues)
        favourite = self._favourite(route, replicas, queues)
        if favourite is None or (queues[favourite] or 0) > (queues[other] or 0) + self._slack:
            return other
        return favourite

    def _favourite(self, route: Route, replicas: Sequence[Key], queues: dict[Key, int | None]) -> Key | None:
        best = self.prefixes.longest(route.chain, queues.keys())
        if best:
            return min(best, key=lambda key: (queues[key] or 0, str(key)))
        return rendezvous(route.home, replicas) if route.home else None

    def sent(self, route: Route, replica: Key) -> None:
        """Until caches tell: a replica that reads a prompt has it."""
        self.prefixes.stored(replica, route.chain)


class ByQueue(Generic[Key]):
    """The shorter queue of two, drawn at random."""

    def __init__(self, seed: int | None = None) -> None:
        self._dice = random.Random(seed)

    def choose(self, route: Route, queues: dict[Key, int | None]) -> Key:  # noqa: ARG002
        """See `Chooser`."""
        return _shorter(self._dice, list(queues), queues)

    def sent(self, route: Route, replica: Key) -> None:
        """It makes no difference."""


class InTurn(Generic[Key]):
    """One after the other."""

    def __init__(self) -> None:
        self._turns = count()

    def choose(self, route: Route, queues: dict[Key, int | None]) -> Key:  # noqa: ARG002
        """See `Chooser`."""
        replicas = sorted(queues, key=str)
        return replicas[next(self._turns) % len(replicas)]

    def sent(self, route: Route, replica: Key) -> None:
        """It makes no difference."""


def make_chooser(policy: Policy, seed: int | None = None) -> Chooser[str]:
    """By its name."""
    if policy == "round-robin":
        return InTurn()
    return ByPrefix(seed) if policy == "prefix" else ByQueue(seed)


def rendezvous(home: str, replicas: Sequence[Key]) -> Key:
    """The replica that a beginning belongs to: the highest draw of a lottery that both names decide."""
    return max(replicas, key=lambda replica: blake2b(f"{home}\0{replica}".encode(), digest_size=8).digest())


def _shorter(dice: random.Random, replicas: Sequence[Key], queues: dict[Key, int | None]) -> Key:
    """Power of two choices: nearly as good as the shortest of all, and no herd follows the same old news."""
    return min(dice.sample(replicas, min(2, len(replicas))), key=lambda key: queues[key] or 0)
