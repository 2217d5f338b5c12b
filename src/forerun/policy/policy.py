"""Which arm and how deep, for all sequences of a round: the choice that should give most tokens per second.

Expected tokens come from acceptance seen on each sequence, position by position, with a prior from earlier requests;
expected seconds from rounds measured on this machine. One row drafter drafts in a round, for all who gain by it; text
drafts run beside it. A drafter that loses is followed no longer, and then plain decoding costs exactly what it costs
without drafters; it is looked at again, each time later. What looking may lose is bounded by one balance. All that a
decision looks at is known before a draft is made, so that it may decide under `rejection`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from forerun.draft.arms import ARMS, MAX_DEPTH, SERVED
from forerun.policy.acceptance import Priors
from forerun.policy.costs import FIRST_SLOPE, CostTable, RoundShape, batch_class
from forerun.policy.decision import PLAIN, Decision, NamedArm
from forerun.policy.planning import DraftPlan, share_rows
from forerun.policy.records import (
    CLEAR,
    FAR_PLAIN_GAP,
    FIRST_GAP,
    LAST_PLAIN_GAP,
    NOTHING,
    PLAIN_GAP,
    Ask,
    Look,
    Member,
    RoundPart,
    RoundResult,
    Size,
)

WARM = 32  # tokens that a drafter must follow before its drafts are good
LEAD = 1.03  # another drafter must promise this much more than the one in use: less is noise
SHARE, ALLOWANCE = 0.006, 1.5  # what may be lost to plain decoding: this share of the time and so many rounds
MOST = 12.0  # rounds that gains may save up for later losses; enough to warm a costly drafter for a look
SETTLED, STAKE = 0.25, 0.5  # rounds that must be in the balance after a debt, and for a drafter that comes back
TRIAL, TRIAL_DEPTH = 3, 3  # rounds of a look, and drafts in each: enough to turn an estimate that has grown old
NEAR = 0.9  # of the best rate: worth another look sooner
LASTING = 16  # rounds in use after which a drafter has won its look; as long it is followed after it was in use
PAUSE = 4  # rounds in which a drafter is not followed, to see what following costs
REFERENCE = 2  # plain rounds of a size of batch that must be measured before anything is compared with them
PATIENCE = 16  # rounds that a batch waits for them
FEW = 8  # sequences; of more, a share is thought about in each round; rounds between thoughts where nothing drafts
NEW = 0.15  # weight of a round in what text drafts bring
TEXTS = "texts"  # looks at text drafts, beside those at row drafters


class Policy:
    """One for an engine."""

    def __init__(self, costs: CostTable, priors: Priors | None = None, overlaps: bool = False) -> None:
        """`overlaps`: rounds are planned while the one before runs, unless tokens are wanted first."""
        self.costs, self.priors, self.overlaps = costs, priors or Priors(), overlaps
        costs.steady = overlaps  # then it is a device's own time that is measured
        self._sequences: dict[int, Member] = {}
        self._sizes: dict[int, Size] = {}
        self.balance = ALLOWANCE  # plain rounds that may still be lost, by all batches together
        self._round = 0
        self._think_at = 0  # the round in which the plan is thought about again
        self._ids: list[int] = []
        self._offered: list[list[str]] = []  # text arms that each sequence had when the plan was thought about
        self._text_of_kind: dict[str, float] = {}

    # Who is there.

    def join(self, number: int, arms: Mapping[str, int], kind: str = "", named: NamedArm | None = None) -> None:
        """A sequence comes. `arms`: name → greatest depth, where the choice is ours; `named`: its own choice."""
        mine = self._sequences[number] = Member(number, {} if named else arms, kind, named, self.priors)
        if not mine.rows:
            return
        many = len(self._sequences)
        size = self._size(many)
        if many == 1:
            self._think([mine], [Ask(number, max(mine.arms.values()))], size, joining=True)
        for drafter in mine.rows:
            if size.following is None or drafter in size.following:
                mine.cold[drafter] = mine.idle[drafter] = 0  # it reads the prompt

    def leave(self, number: int) -> None:
        """A sequence is over."""
        self._sequences.pop(number, None)

    def drop(self, number: int, drafter: str) -> None:
        """A drafter failed: it is not chosen again for this sequence, unless it is given back."""
        mine = self._sequences.get(number)
        if mine is None:
            return
        if mine.named is not None and mine.named.arm.drafter == drafter:
            mine.named = None
        mine.give({arm: most for arm, most in mine.arms.items() if ARMS[arm].drafter != drafter}, self.priors)
        mine.cold.pop(drafter, None)
        self._think_at = 0

    def give(self, number: int, arms: Mapping[str, int]) -> None:
        """All arms that a sequence may use from now on."""
        self._sequences[number].give(arms, self.priors)
        self._think_at = 0

    def follows(self, number: int) -> frozenset[str]:
        """The drafters that should follow a sequence. It changes rarely."""
        mine = self._sequences[number]
        if mine.named is not None:
            return frozenset((mine.named.arm.drafter,))
        return frozenset(mine.cold) | mine.readers if self._follows_text(mine) else frozenset(mine.cold)

    def _follows_text(self, mine: Member) -> bool:
        """In a large batch every eighth sequence, and those of kinds whose text drafts bring something."""
        return len(self._sequences) <= FEW or mine.id % FEW == 0 or self._text_of_kind.get(mine.kind, 0.0) > SHARE

    def wants_tokens(self, numbers: Iterable[int]) -> bool:
        """Should the tokens of the round before be known before the next one of these is planned, for text drafts?"""
        mine = [self._sequences[number] for number in numbers]
        if any(one.named is not None and one.named.arm.at_once for one in mine):
            return True
        return any(one.texts for one in mine) and (not self.overlaps or self._size(len(mine)).text_waits)

    def needs_watch(self, number: int) -> bool:
        """Should text drafts of this sequence that do not run be compared with the tokens that come?"""
        mine = self._sequences[number]
        many = len(self._sequences)
        return bool(mine.texts) and (many <= FEW or ((self._round + number) % FEW == 0 and self._follows_text(mine)))

    def seconds_saved(self, number: int) -> float:
        """Against plain decoding."""
        return self._sequences[number].saved

    # Deciding.

    def decide(self, asks: Sequence[Ask]) -> list[Decision]:
        """How each sequence runs the next round."""
        self._round += 1
        sequences = self._sequences
        size = self._size(len(asks))
        ids = [ask.id for ask in asks]
        if ids != self._ids and len(ids) == 1:
            self._end_look(size)  # it was another sequence's
        if self._round >= self._think_at or (ids != self._ids and len(ids) <= FEW) or self._has_news(asks):
            self._think([sequences[number] for number in ids], asks, size)
            busy = size.wanted is not None or size.trial is not None
            self._think_at = self._round + (2 + len(ids) // FEW if busy else FEW)
        self._ids = ids
        plan = self._plan_now(size)
        decisions = []
        for ask in asks:
            mine = sequences[ask.id]
            if mine.plan is plan and not ask.available and mine.choice.depth <= ask.limit:
                decisions.append(mine.choice)
            else:
                decisions.append(self._choose(mine, ask, plan))
        return decisions

    def _has_news(self, asks: Sequence[Ask]) -> bool:
        """Are there text arms that the plan was not thought about with? They change what is best for a few sequences;
        in a large batch a text draft only has to be worth its rows.
        """
        if len(asks) > FEW:
            return False
        offered = [sorted(arm for arm, most in (ask.available or {}).items() if most) for ask in asks]
        if not any(offered) or offered == self._offered:
            return False
        self._offered = offered
        return True

    def _plan_now(self, size: Size) -> DraftPlan:
        """The plan of the size, a look at another drafter, or plain decoding."""
        for look in size.looks.values():
            if look.rest > 0:
                look.rest -= 1
        if not self.costs.known or (size.measured < REFERENCE and size.waited < PATIENCE):
            size.waited += 1
            return NOTHING
        if size.blocked:
            return NOTHING
        if size.trial is not None:
            look = next(look for (name, _), look in size.looks.items() if name == size.trial and look.left)
            look.left -= 1
            if not look.left:
                size.trial = None
                look.lost(near=size.trial_plan.rate > NEAR * size.plan.rate)
                self._think_at = 0
            return size.trial_plan
        if size.plan.drafter is None:
            size.since_plain = 0
            return size.plan
        size.since_plain += 1
        if self.costs.in_doubt and size.since_plain > PLAIN_GAP:
            size.since_plain = 0
            return NOTHING
        if size.since_plain > min(size.plain_gap, FAR_PLAIN_GAP if size.lead > CLEAR else LAST_PLAIN_GAP):
            size.since_plain, size.plain_gap = 0, min(FAR_PLAIN_GAP, 2 * size.plain_gap)
            return NOTHING
        return size.plan

    def _choose(self, mine: Member, ask: Ask, plan: DraftPlan) -> Decision:
        if mine.named is not None:
            return self._choose_named(mine.named, ask)
        if plan is NOTHING or not mine.arms or ask.limit <= 0:
            return PLAIN
        choice, worth = PLAIN, 0.0
        drafter = plan.drafter
        if drafter is not None and drafter in mine.rows and not mine.cold.get(drafter, 1):
            arm = mine.rows[drafter]
            choice, worth = _worth(arm, mine.offers(arm, min(plan.depth, ask.limit)), plan.price)
        for arm, most in (ask.available or {}).items() if not plan.look else ():
            if most and arm in mine.arms:
                other, value = _worth(arm, mine.offers(arm, min(most, ask.limit)), plan.price)
                if value > worth:
                    choice, worth = other, value
        if ask.available or ask.limit < plan.depth:
            mine.plan = None
        else:
            mine.choice, mine.plan = choice, plan
        return choice

    def _choose_named(self, named: NamedArm, ask: Ask) -> Decision:
        decision = named.decide(ask.limit)
        if not named.arm.at_once or not ask.available or decision.arm is None:
            return decision
        most = max((ask.available.get(arm.name, 0) for arm in SERVED[named.arm.drafter]), default=0)
        return Decision(decision.arm, min(most, decision.depth)) if most else PLAIN

    # Thinking.

    def _think(self, members: list[Member], asks: Sequence[Ask], size: Size, joining: bool = False) -> None:
        """Find the best plan, who should be followed, and whether a drafter that is not in use is looked at."""
        mine = [one for one in members if one.named is None and one.arms]
        many = len(members)
        if size.blocked and self.balance >= SETTLED:
            size.blocked = False
        drafters = dict.fromkeys(drafter for one in mine for drafter in one.rows)
        texts = self._texts(members, asks)
        named = [one.named.decide(ask.limit) for one, ask in zip(members, asks, strict=True) if one.named is not None]
        shape = _named_shape(many, members, named, self.overlaps)
        base = self.costs.times(shape)
        plain = self._plan(None, mine, texts, shape, base)
        plans = {drafter: self._plan(drafter, mine, texts, shape, base) for drafter in drafters}
        kept = plans.get(size.wanted or "", plain)
        best = max([plain, *plans.values()], key=lambda plan: plan.rate)
        if best.drafter != size.wanted and best.rate < LEAD * kept.rate:
            best = kept
        if size.blocked or not self._affords(best.drafter, mine, base, many, joining):
            best = plain
        if best.drafter is None and texts and plain.tokens == many and not joining:
            best = self._look_at_texts(size, texts, shape, base, plain)
        size.lead = best.rate * base / many
        following = set()
        waiting = []
        for drafter, plan in plans.items():
            look = self._look(size, drafter, mine[0].kind if many == 1 else "")
            if drafter == best.drafter and self._pauses(look, drafter, size, base, many):
                for one in mine:
                    one.cold.pop(drafter, None)
                    one.plan = None
                best = plain
            elif drafter == best.drafter:
                following.add(drafter)
                if any(one.cold.get(drafter, 1) == 0 for one in mine):
                    self._is_used(look, size)
            elif look.left:
                following.add(drafter)
            else:
                if look.used and not size.blocked:  # in debt, what it promises is not in question
                    look.lost(near=look.used >= LASTING)
                waiting.append((look.last, drafter, look, plan))
        # The one that has waited longest comes first: looks that cost less would else use up what it needs.
        for _, drafter, look, plan in sorted(waiting, key=lambda one: one[0]):
            warm = [one for one in mine if one.cold.get(drafter, 1) == 0]
            rounds = max(look.rest, 0 if 2 * len(warm) >= len(mine) else WARM)
            price = self._price_of_look(plan, plain, base, rounds * self.costs.follow_times(drafter, many))
            # Once it follows, what that has cost is spent: then only the look itself must not end in debt.
            if size.blocked or (price > self.balance and not look.warming):
                look.warming = False
                if price > MOST or look.rest:
                    continue
                break
            if look.rest <= (look.gap // 2 if joining else WARM):
                following.add(drafter)
                look.warming = True
                if joining:
                    look.rest = min(look.rest, 2)
            if look.rest == 0 and 2 * len(warm) >= len(mine) and size.trial is None and not joining:
                self._begin(look, drafter, warm, size, shape, base)
        size.wanted = best.drafter
        if best.drafter is not None and any(one.cold.get(best.drafter, 1) for one in mine):
            able = self._plan(best.drafter, mine, texts, shape, base, warm=True)
            best = able if able.rate > plain.rate else plain
        if (best.drafter, best.depth) != (size.plan.drafter, size.plan.depth) or best.rate != size.plan.rate:
            size.plan = best
        size.following = frozenset(following)
        if self.overlaps:
            self._weigh_waiting(mine, size, shape, base)
        if not joining:
            self._follow(mine, size)

    def _texts(self, members: list[Member], asks: Sequence[Ask]) -> dict[int, list[float]]:
        """By sequence the chances of its best text drafts, of those that it may have now."""
        found = {}
        for one, ask in zip(members, asks, strict=True):
            if one.named is None and ask.available:
                offers = [
                    one.offers(arm, min(most, ask.limit))
                    for arm, most in ask.available.items()
                    if most and arm in one.arms
                ]
                if offers:
                    found[one.id] = max(offers, key=sum)
        return found

    def _look_at_texts(
        self, size: Size, texts: dict[int, list[float]], shape: RoundShape, base: float, plain: DraftPlan
    ) -> DraftPlan:
        """A round with text drafts that would pay if rows cost little: what wide passes cost may have been learned on a
        machine that was busy, and rounds without drafts would never tell.
        """
        many, costs, look = shape.sequences, self.costs, self._look(size, TEXTS, "")

        def times(rows: int) -> float:
            return base * (1 + FIRST_SLOPE * (rows - shape.rows) / many)

        offers = [chances[:TRIAL_DEPTH] for chances in texts.values()]
        rate, _, tokens, price, drafts = share_rows(offers, many, shape.rows, times)
        lost = costs.pass_times(shape.rows + drafts, many) / costs.pass_times(shape.rows, many) - tokens / many
        if look.rest or size.blocked or rate < LEAD * plain.rate or lost > self.balance:
            return plain
        look.lost()
        self._offered = []  # the next round with text drafts is thought about again
        return DraftPlan(None, 0, price, rate, plain.times, tokens)

    def _plan(
        self,
        drafter: str | None,
        mine: Sequence[Member],
        texts: dict[int, list[float]],
        shape: RoundShape,
        base: float,
        warm: bool = False,
        trial: bool = False,
    ) -> DraftPlan:
        """The best plan with this drafter. `warm`: only for whom it follows; `trial`: at least for half of them."""
        many, costs = shape.sequences, self.costs
        beside = base - costs.pass_times(shape.rows, many)

        most = costs.widest(many) - shape.rows

        def times(rows: int) -> float:
            return costs.pass_times(rows, many)

        if drafter is None:
            rate, spent, tokens, price, _ = share_rows(list(texts.values()), many, shape.rows, times, beside, 0, most)
            return DraftPlan(None, 0, price, rate, spent, tokens)
        able = [one for one in mine if drafter in one.rows and not (warm and one.cold.get(drafter, 1))]
        others = [offers for number, offers in texts.items() if all(one.id != number for one in able)]
        if drafter not in shape.follows:
            beside += costs.follow_times(drafter, many)
        best = DraftPlan(drafter, 0, 1.0, 0.0)
        if not able:
            return best
        step = costs.step_times(drafter, len(able))
        if many == 1 and not texts:
            return self._plan_alone(drafter, able[0], beside, step, trial)
        deepest = max(one.arms[one.rows[drafter]] for one in able)
        least = (len(able) + 1) // 2 if trial else 1
        for depth in range(1, min(deepest, TRIAL_DEPTH if trial else deepest) + 1):
            offers = list(others)
            for one in able:
                own = one.offers(one.rows[drafter], depth)
                other = texts.get(one.id)
                offers.append(own if other is None or sum(own) >= sum(other) else other)
            found = share_rows(offers, many, shape.rows, times, beside + depth * step, least, most)
            if found[0] < best.rate:
                break
            best = DraftPlan(
                drafter, depth, 0.0 if trial and many == 1 else found[3], found[0], found[1], found[2], trial
            )
        return best

    def _plan_alone(self, drafter: str, one: Member, beside: float, step: float, trial: bool) -> DraftPlan:
        """The same for one sequence, which gets all drafts of the best depth."""
        costs, tokens, best = self.costs, 1.0, DraftPlan(drafter, 0, 1.0, 0.0)
        most = TRIAL_DEPTH if trial else MAX_DEPTH
        for depth, chance in enumerate(one.offers(one.rows[drafter], min(most, costs.widest(1) - 1)), 1):
            tokens += chance
            times = costs.pass_times(1 + depth, 1) + beside + depth * step
            if tokens > best.rate * times:
                best = DraftPlan(drafter, depth, 0.0, tokens / times, times, tokens, trial)
        return best

    def _look(self, size: Size, drafter: str, kind: str) -> Look:
        look = size.looks.get((drafter, kind))
        if look is None:
            look = size.looks[drafter, kind] = Look()
        return look

    def _affords(self, drafter: str | None, mine: list[Member], base: float, many: int, joining: bool) -> bool:
        """To come back into use a drafter must follow for a while, and its first drafts may have bad luck."""
        if drafter is None or self._size(many).wanted == drafter or any(one.cold.get(drafter, 1) == 0 for one in mine):
            return True
        following = 0.0 if joining else WARM * self.costs.follow_times(drafter, many) / base
        return following + STAKE <= self.balance

    def _end_look(self, size: Size) -> None:
        for look in size.looks.values():
            look.left = 0
        size.trial = None

    def _is_used(self, look: Look, size: Size) -> None:
        look.used += 1
        if look.left:
            look.left, size.trial = 0, None
        if look.used >= LASTING:
            look.gap = FIRST_GAP
        look.rest = look.gap

    def _pauses(self, look: Look, drafter: str, size: Size, base: float, many: int) -> bool:
        """Once, where it could make the difference: rounds without following tell what it costs."""
        if (
            look.paused == 0
            and look.used >= LASTING
            and self.costs.follow_error(drafter, many) > (size.lead - 1) * base
        ):
            look.paused = self._round + PAUSE
        return self._round < look.paused

    def _price_of_look(self, plan: DraftPlan, plain: DraftPlan, base: float, following: float) -> float:
        """Plain rounds that a look should lose: its rounds, and following until it begins."""
        return TRIAL * max(0.0, plan.times / base - plan.tokens / plain.tokens) + following / base

    def _begin(
        self,
        look: Look,
        drafter: str,
        warm: list[Member],
        size: Size,
        shape: RoundShape,
        base: float,
    ) -> None:
        """Run another drafter for a few rounds, not deep, to see whether the text or the costs have changed."""
        for one in warm:
            one.seen[one.rows[drafter]].age()
            one.chances.pop(one.rows[drafter], None)
            one.plan = None
        size.trial, look.left, look.last = drafter, TRIAL, self._round
        size.trial_plan = self._plan(drafter, warm, {}, shape, base, trial=True)

    def _follow(self, mine: list[Member], size: Size) -> None:
        """Bring who follows up to date. A drafter is kept for a while after it was wanted: to come back takes time."""
        following = size.following or frozenset()
        for one in mine:
            for drafter in one.rows:
                if drafter in following:
                    one.cold.setdefault(drafter, WARM)
                    one.idle[drafter] = self._round
                elif drafter in one.cold and (self._round - one.idle.get(drafter, 0) > LASTING or size.blocked):
                    del one.cold[drafter]

    def _weigh_waiting(self, mine: list[Member], size: Size, shape: RoundShape, base: float) -> None:
        """On a device that overlaps: are text drafts worth what it costs to know the tokens first?"""
        many, costs = shape.sequences, self.costs
        step = max(1, many // FEW)
        more = costs.pass_times(shape.rows + step, many) - costs.pass_times(shape.rows, many)
        size.row_price = max(0.0, more) / step * many / base
        token = base / many if size.plan.drafter is None else size.plan.times / size.plan.tokens
        cost = costs.wait_times(many) * (1.0 if size.text_waits else LEAD)
        size.text_waits = not size.blocked and sum(one.text for one in mine) * token > cost

    # Learning.

    def learn(self, result: RoundResult) -> None:
        """What came of a round."""
        parts = result.parts
        many = len(parts)
        if not many:
            return
        size = self._size(many)
        drafted = [part for part in parts if part.drafted]
        decisions = [Decision(part.decision.arm, part.drafted) for part in drafted]
        shape = RoundShape(
            many, many + sum(d.depth for d in decisions), _drafts(decisions), result.follows, result.waited
        )
        if result.typical and self._tells(shape, result.prompt_rows):
            read = replace(shape, prompt_rows=result.prompt_rows) if result.prompt_rows else shape
            self.costs.learn(read, result.seconds, result.drafting)
            if not drafted:
                size.measured += 1
        stride = 1 + many // (2 * FEW)
        for part in drafted:
            mine = self._sequences.get(part.id)
            arm = part.decision.arm
            if mine is None or arm is None or (self._round + part.id) % stride:
                continue
            if mine.named is not None:
                mine.named.learn(part.drafted, part.accepted)
            elif arm in mine.seen:
                mine.learn(arm, part.drafted, part.accepted)
                self.priors.learn(arm, mine.kind, part.drafted, part.accepted)
        self._warm(parts)
        if result.waited:
            self._note_texts(parts, size.row_price)
        if self.costs.known:
            self._account(result, drafted, shape, size)

    def _tells(self, shape: RoundShape, prompt_rows: int) -> bool:
        """Does the time of a round tell what its generated rows cost? Where prompts take most of it, it does not."""
        return not prompt_rows or self.costs.prompt_times(prompt_rows) < self.costs.times(shape)

    def _warm(self, parts: Sequence[RoundPart]) -> None:
        """Drafters have followed so many more tokens."""
        for part in parts:
            mine = self._sequences.get(part.id)
            if mine is None:
                continue
            for drafter, left in mine.cold.items():
                if left:
                    mine.cold[drafter] = max(0, left - part.tokens)
                    mine.plan = None

    def _account(self, result: RoundResult, drafted: list[RoundPart], shape: RoundShape, size: Size) -> None:
        """Keep the balance, in plain rounds, by what such rounds cost: a pause of the machine is no loss.

        What sequences cost whose users named an arm is part of what the round takes anyway.
        """
        many = shape.sequences
        self.balance = min(MOST, self.balance + SHARE)
        if not drafted and not result.follows and not result.waited:
            return
        members = [one for part in result.parts if (one := self._sequences.get(part.id)) is not None]
        ours = [part for part in drafted if self._chooses_for(part.id)]
        named = [Decision(part.decision.arm, part.drafted) for part in drafted if not self._chooses_for(part.id)]
        anyway = _named_shape(many, members, named, result.waited)
        if anyway != shape:
            base, times = self.costs.times(anyway), self.costs.times(shape)
            gained = sum(part.tokens - 1 for part in ours)
            gain = gained / many - (times - base) / base
            self.balance += gain
            if gain < 0 and self.balance < 0 and not size.blocked:
                size.blocked, self._think_at = True, 0
                self._end_look(size)
            seconds = base / self.costs.second
            lost = (times - base) / self.costs.second
            for part in result.parts:
                if self._chooses_for(part.id):
                    self._sequences[part.id].saved += (part.tokens - 1) * seconds - lost
            self.balance = min(MOST, self.balance)

    def _chooses_for(self, number: int) -> bool:
        mine = self._sequences.get(number)
        return mine is not None and mine.named is None

    def watch(self, number: int, found: Mapping[str, tuple[int, int]]) -> None:
        """Text drafts that were not run, compared with the tokens that came: by arm how many, and how many were right.

        Of a sequence that needs it and ran no text arm in the round; empty where no text arm had anything.
        """
        mine = self._sequences.get(number)
        if mine is None:
            return
        size = self._size(max(1, len(self._ids)))
        price, worth = size.row_price, 0.0
        for arm, (drafted, accepted) in found.items():
            if arm in mine.arms and drafted:
                mine.learn(arm, drafted, accepted)
                self.priors.learn(arm, mine.kind, drafted, accepted)
                worth = max(worth, _worth(arm, mine.offers(arm, FEW), price)[1])
        if not self.overlaps or size.text_waits:
            return
        row = mine.choice
        if worth and row.arm is not None and row.arm in mine.arms:
            worth -= _worth(row.arm, mine.offers(row.arm, row.depth), price)[1]
        self._note_text(mine, max(0.0, worth))

    def _note_texts(self, parts: Sequence[RoundPart], price: float) -> None:
        """All text drafts that were worth it ran in this round."""
        for part in parts:
            mine = self._sequences.get(part.id)
            if mine is not None and mine.texts:
                arm = part.decision.arm
                ran = part.drafted and arm is not None and ARMS[arm].at_once
                self._note_text(mine, part.accepted - price * part.drafted if ran else 0.0)

    def _note_text(self, mine: Member, worth: float) -> None:
        mine.text += NEW * (worth - mine.text)
        before = self._text_of_kind.get(mine.kind, 0.0)
        self._text_of_kind[mine.kind] = before + NEW / FEW * (worth - before)

    def _size(self, sequences: int) -> Size:
        key = batch_class(sequences)
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = Size()
        return size


def _worth(arm: str, chances: list[float], price: float) -> tuple[Decision, float]:
    """The drafts that are worth their rows, and by how much."""
    depth, worth = 0, 0.0
    for chance in chances:
        if chance < price:
            break
        depth += 1
        worth += chance - price
    return (Decision(arm, depth), worth) if depth else (PLAIN, 0.0)


def _named_shape(many: int, members: Iterable[Member], named: Sequence[Decision], waits: bool) -> RoundShape:
    """Of a round in which none but sequences with a named arm draft. `waits`: a round of text drafts does."""
    drafters = {one.named.arm.drafter: one.named.arm.at_once for one in members if one.named is not None}
    follows = frozenset(drafter for drafter, at_once in drafters.items() if not at_once)
    rows = many + sum(decision.depth for decision in named)
    return RoundShape(many, rows, _drafts(named), follows, waits and any(drafters.values()))


def _drafts(decisions: Iterable[Decision]) -> tuple[tuple[str, int, int], ...]:
    """Of a round: each drafter, its deepest draft, and sequences that it drafts for."""
    found: dict[str, tuple[int, int]] = {}
    for decision in decisions:
        if decision.drafter is not None and decision.depth:
            deepest, many = found.get(decision.drafter, (0, 0))
            found[decision.drafter] = max(deepest, decision.depth), many + 1
    return tuple((drafter, *pair) for drafter, pair in sorted(found.items()))
