"""What a policy is asked and told, and what it keeps of each sequence and of each size of batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forerun.draft.arms import ARMS, FORCED
from forerun.policy.acceptance import Acceptance, Priors
from forerun.policy.decision import PLAIN, Decision, NamedArm
from forerun.policy.planning import DraftPlan

FIRST_GAP, LAST_GAP = 32, 2048  # rounds between looks at a drafter that loses; each one that loses doubles it
FIRST_REST = 4  # rounds before the first look, while sequences are still followed from their prompts on
# Plain decoding is measured again after so many rounds, where it may soon be the better choice and where it is far.
PLAIN_GAP, LAST_PLAIN_GAP, FAR_PLAIN_GAP, CLEAR = 4, 64, 256, 1.3

NOTHING = DraftPlan(None, 0, 2.0, 1.0)  # no draft is worth its row


@dataclass(frozen=True, slots=True)
class Ask:
    """A sequence that runs in the round to be decided on."""

    id: int
    limit: int  # drafts it may have at most
    # Drafts that each text arm may have now; None while the tokens are not known: then text arms have none.
    available: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class RoundPart:
    """What a round gave one sequence."""

    id: int
    decision: Decision
    drafted: int
    accepted: int
    tokens: int  # that came: one more than accepted, or fewer where the answer ended


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What came of a round, and how long it took."""

    parts: Sequence[RoundPart]
    seconds: float  # from the end of the round before
    follows: frozenset[str] = frozenset()  # drafters that followed in it
    waited: bool = False  # it was planned after the tokens of the round before were known, on a device that overlaps
    typical: bool = True  # nothing was compiled or captured, and its seconds tell nothing of who came or went
    drafting: Mapping[str, float] = field(default_factory=dict)  # seconds of each drafter, where known apart
    prompt_rows: int = 0  # in the same pass


@dataclass(slots=True)
class Look:
    """When a drafter that is not in use is looked at again."""

    gap: int = FIRST_GAP
    rest: int = FIRST_REST  # rounds until then
    last: int = 0  # the round of the last one
    warming: bool = False  # the drafter follows for the look that comes
    left: int = 0  # rounds of the look that is under way
    used: int = 0  # rounds that it has been in use
    paused: int = 0  # the round until which it was not followed, to see what following costs

    def lost(self, near: bool = False) -> None:
        """It was not worth it."""
        self.gap = max(FIRST_GAP, self.gap // 2) if near else min(LAST_GAP, 2 * self.gap)
        self.rest, self.left, self.used, self.warming = self.gap, 0, 0, False


@dataclass(slots=True)
class Size:
    """Batches of about the same size."""

    blocked: bool = False  # it led into debt: plain decoding until the balance has settled
    measured: int = 0  # plain rounds
    waited: int = 0  # rounds that were decided on while too few were measured
    plain_gap: int = PLAIN_GAP
    since_plain: int = 0
    looks: dict[tuple[str, str], Look] = field(default_factory=dict)  # by drafter and, alone, kind of request
    plan: DraftPlan = NOTHING
    wanted: str | None = None  # the row drafter that would be best if all were followed by it
    following: frozenset[str] | None = None  # row drafters in use or soon looked at; None: nothing was thought yet
    trial: str | None = None
    trial_plan: DraftPlan = NOTHING
    text_waits: bool = True  # are text drafts worth waiting for?
    row_price: float = 0.0  # tokens that a row beside plain ones must bring
    lead: float = 1.0  # of the plan over plain decoding


class Member:
    """What is known of one sequence."""

    __slots__ = (
        "arms", "chances", "choice", "cold", "id", "idle", "kind", "named", "plan", "readers", "rows", "saved", "seen",
        "text", "texts",
    )  # fmt: skip

    def __init__(self, number: int, arms: Mapping[str, int], kind: str, named: NamedArm | None, priors: Priors) -> None:
        self.id, self.kind, self.named = number, kind, named
        self.arms: dict[str, int] = {}
        self.rows: dict[str, str] = {}  # row drafter → its arm
        self.texts: frozenset[str] = frozenset()  # text drafters,
        self.readers: frozenset[str] = frozenset()  # and those of them that must read the tokens that come
        self.seen: dict[str, Acceptance] = {}
        self.chances: dict[str, list[float]] = {}  # by arm, until something of it is learned
        self.cold: dict[str, int] = {}  # row drafters that follow → tokens until their drafts are good
        self.idle: dict[str, int] = {}  # of these, rounds since they were last wanted
        self.choice = PLAIN  # of the row drafter,
        self.plan: DraftPlan | None = None  # and the plan that it was chosen by, until something is learned
        self.text = 0.0  # tokens that text drafts would bring in a round, lately
        self.saved = 0.0  # seconds
        self.give(arms, priors)

    def give(self, arms: Mapping[str, int], priors: Priors) -> None:
        """What was learned of an arm before it was dropped still counts."""
        self.arms = dict(arms)
        self.rows = {ARMS[arm].drafter: arm for arm in arms if not ARMS[arm].at_once}
        self.texts = frozenset(ARMS[arm].drafter for arm in arms if ARMS[arm].at_once)
        self.readers = self.texts - {FORCED.drafter}
        for arm in arms:
            if arm not in self.seen:
                self.seen[arm] = priors.acceptance(arm, self.kind)
        self.plan = None

    def offers(self, arm: str, most: int) -> list[float]:
        """The chances of so many drafts of an arm."""
        found = self.chances.get(arm)
        if found is None:
            found = self.chances[arm] = self.seen[arm].survival(self.arms[arm])
        return found if most >= len(found) else found[:most]

    def learn(self, arm: str, drafted: int, accepted: int) -> None:
        """What came of drafts, or would have come."""
        self.seen[arm].learn(drafted, accepted)
        self.chances.pop(arm, None)
        self.plan = None
