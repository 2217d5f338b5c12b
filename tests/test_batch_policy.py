"""Whether a batch drafts: simulated engines whose truth is known."""

from forerun.policy.batch import CLEAR, CLEARLY, FIRST_GAP, FIRST_LOOK, LAST_GAP, PATIENCE, BatchPolicy


class World:
    """An engine of one batch size: seconds and tokens of a round, plain and drafting."""

    def __init__(self, sequences: int, plain: tuple[float, int], drafting: tuple[float, int]) -> None:
        self.policy, self.sequences, self.rounds = BatchPolicy(), sequences, {False: plain, True: drafting}
        self.drafted: list[bool] = []
        self.tokens, self.seconds = 0, 0.0

    def run(self, rounds: int, able: int | None = None) -> None:
        for _ in range(rounds):
            drafts = self.policy.drafts(self.sequences if able is None else able, self.sequences)
            seconds, tokens = self.rounds[drafts]
            self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
            self.drafted.append(drafts)
            self.policy.delivered(list(range(self.sequences)), self.seconds, tokens, drafts, False, True, 0.0)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def test_drafting_that_pays_is_used_soon() -> None:
    world = World(16, plain=(1.0, 16), drafting=(1.5, 36))
    world.run(500)
    assert all(world.drafted[2 * FIRST_LOOK + 2 : 100])
    assert world.rate > 0.95 * 36 / 1.5


def test_drafting_that_does_not_pay_costs_next_to_nothing() -> None:
    world = World(16, plain=(1.0, 16), drafting=(3.0, 36))
    world.run(30_000)
    assert world.rate > 0.98 * 16
    assert 2 * CLEAR < sum(world.drafted) < 100, "it is looked at again, ever more rarely"


def test_a_pause_in_the_first_round_does_not_decide() -> None:
    """All were paused, or the machine was busy, when plain decoding was first timed."""
    world = World(8, plain=(1.0, 8), drafting=(3.0, 18))
    world.run(1)
    world.seconds += 50.0
    world.run(FIRST_GAP)
    assert sum(world.drafted) == CLEAR


def test_a_look_at_what_clearly_loses_ends_early() -> None:
    """What only comes out a little behind is looked at for as long as it takes to be sure."""
    for slower, rounds in ((CLEARLY - 0.05, FIRST_LOOK), (CLEARLY + 0.05, CLEAR)):
        world = World(8, plain=(1.0, 8), drafting=(2 * slower, 16))
        world.run(FIRST_GAP)
        assert sum(world.drafted) == rounds


def test_plain_decoding_that_clearly_loses_is_left_early() -> None:
    world = World(8, plain=(1.0, 8), drafting=(1.0, 16))
    world.run(3 * FIRST_GAP)
    looks = len(world.drafted) // FIRST_GAP
    assert FIRST_LOOK < world.drafted.count(False) <= FIRST_LOOK + 1 + looks * CLEAR


def test_the_other_way_is_found_when_the_world_changes() -> None:
    world = World(8, plain=(1.0, 8), drafting=(3.0, 18))
    world.run(1000)
    world.rounds[True] = (1.2, 18)
    world.run(3 * LAST_GAP)
    assert world.drafted[-1]
    world.rounds[True] = (3.0, 18)
    world.run(3 * LAST_GAP)
    assert not world.drafted[-1]


def test_sizes_of_batches_are_told_apart() -> None:
    world = World(4, plain=(1.0, 4), drafting=(1.2, 10))
    world.run(300)
    assert world.policy.drafts(4, 4) and world.policy.drafts(3, 3)
    assert not world.policy.drafts(64, 64), "nothing is known of such: plain first"


def test_rounds_in_which_somebody_comes_or_goes_count_by_the_answer() -> None:
    """Drafting is faster in calm rounds, but most rounds have a prompt, and there it loses."""
    policy, now, number = BatchPolicy(), 0.0, 0
    for step in range(400):
        drafts = policy.drafts(64, 64)
        busy = step % 10 != 0
        now += (2.0 if drafts else 1.4) if busy else (1.1 if drafts else 1.0)
        number += busy
        policy.delivered([number, *range(100, 163)], now, 160 if drafts else 64, drafts, busy, True, 0.0)
        if busy:
            policy.has_ended(90)
    assert not policy.drafts(64, 64)
    assert policy.plain_seconds(64) > 0


def test_captures_tell_nothing() -> None:
    policy = BatchPolicy()
    for step in range(1000):
        policy.delivered(list(range(16)), float(step), 16, False, False, False, 0.0)
    assert not policy.drafts(16, 16) and not policy.plain_seconds(16)


def test_rounds_that_a_clock_saw_no_time_in() -> None:
    world = World(16, plain=(0.0, 16), drafting=(0.0, 36))
    world.run(2 * FIRST_GAP)
    assert any(world.drafted) and not all(world.drafted)


def test_too_few_who_can_draft_make_a_plain_round() -> None:
    world = World(16, plain=(1.0, 16), drafting=(1.0, 40))
    world.run(200)
    assert world.policy.drafts(8, 16) and not world.policy.drafts(7, 16)


def test_drafters_read_prompts_only_where_drafts_may_come() -> None:
    world = World(16, plain=(1.0, 16), drafting=(3.0, 36))
    assert world.policy.admits(16), "nothing was compared yet"
    world.run(2 * FIRST_LOOK + 40)
    assert not world.policy.admits(16)
    admitted = []
    for _ in range(2 * FIRST_GAP):
        admitted.append(world.policy.admits(16))
        world.run(1)
    assert any(admitted) and not all(admitted), "before another look they read again"


def test_answers_that_end_together_hide_no_busy_rounds() -> None:
    """All of them come one by one and end in one round; drafting is slow while they come."""
    policy, now, number = BatchPolicy(), 0.0, 0
    for _ in range(400):
        for step in range(40):
            drafts, busy = policy.drafts(64, 64), step < 20
            number += busy
            now += (3.0 if drafts else 1.4) if busy else (1.1 if drafts else 1.0)
            policy.delivered([number, *range(10**6, 10**6 + 63)], now, 160 if drafts else 64, drafts, busy, True, 0.0)
        for _ in range(64):
            policy.has_ended(40)
    assert not policy.drafts(64, 64)


def test_rounds_without_a_token_are_not_compared() -> None:
    """All of them failed, or nobody's token could be decided on."""
    world = World(4, plain=(1.0, 4), drafting=(1.0, 0))
    world.run(3 * FIRST_LOOK)
    world.rounds[True] = (1.0, 10)
    world.run(3 * FIRST_LOOK)
    assert world.drafted[-1]


class BusyWorld:
    """Clients that send their next prompt when an answer ends; drafters that shall draft read prompts too."""

    CLIENTS, ANSWER = 64, 90
    PLAIN, DRAFTING, TOKENS = 2.0, 4.2, 2  # milliseconds of a round, and tokens that each one gets of a drafting round
    PROMPT, READING = 4.0, 7.0  # what a prompt takes, and what drafters take to read it

    def __init__(self, can_draft: float = 1.0) -> None:
        self.policy, self.can_draft = BatchPolicy(), can_draft
        self.left = [1 + self.ANSWER * n // self.CLIENTS for n in range(self.CLIENTS)]
        self.able, self.who, self.next = [False] * self.CLIENTS, list(range(self.CLIENTS)), self.CLIENTS
        self.tokens, self.now, self.read = 0, 0.0, 0

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            joining = [n for n in range(self.CLIENTS) if self.left[n] <= 0]
            reads = [n for n in joining if n < self.can_draft * self.CLIENTS and self.policy.admits(self.CLIENTS)]
            for n in joining:
                self.left[n], self.able[n] = self.ANSWER, n in reads
                self.who[n], self.next = self.next, self.next + 1
                self.policy.has_ended(self.ANSWER)
            drafts = self.policy.drafts(sum(self.able), self.CLIENTS)
            each = self.TOKENS if drafts else 1
            self.left = [left - each for left in self.left]
            self.now += self.PROMPT * len(joining) + (self.DRAFTING if drafts else self.PLAIN)
            self.read += len(reads)
            self.tokens += each * self.CLIENTS
            took, prompts = self.READING * len(reads), bool(joining)
            self.policy.delivered(list(self.who), self.now, each * self.CLIENTS, drafts, prompts, True, took)
            self.now += took

    @property
    def of_plain(self) -> float:
        """Tokens per millisecond, of those that plain decoding gives."""
        return self.tokens / self.now * (self.PLAIN / self.CLIENTS + self.PROMPT / self.ANSWER)


def test_looks_at_drafting_that_comes_near_cost_next_to_nothing() -> None:
    """Drafting nearly pays, which is worth a look soon, but for each look drafters read the prompts of half a batch."""
    world = BusyWorld()
    world.run(2_000)
    first = world.read  # for the comparison at the start, and for nothing else yet
    world.run(20_000)
    assert world.of_plain > 0.985
    assert world.read > 3 * first, "it is looked at again all the same"


def test_what_drafters_read_is_not_held_against_plain_decoding() -> None:
    """Prompts are read for both ways while they are compared: plain decoding alone would do without."""
    world = BusyWorld()
    world.TOKENS, world.DRAFTING, world.READING = 2, 3.9, 30.0
    world.run(20_000)
    assert world.of_plain > 0.97


def test_a_look_that_too_few_can_take_part_in_is_given_up() -> None:
    """Else drafters would read prompts for drafts that never come."""
    world = BusyWorld(can_draft=0.4)
    world.run(4 * PATIENCE)
    read = world.read
    world.run(40_000)
    assert world.of_plain > 0.96
    assert 0 < world.read - read < 0.1 * 0.4 * 40_000 * BusyWorld.CLIENTS / BusyWorld.ANSWER
