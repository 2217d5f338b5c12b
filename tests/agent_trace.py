"""What agents send: a system prompt with tools that all share, turns with tool calls, branches, thoughts that go.

A trace is a script. It says what is asked next, hears the answers, and goes on from them, so that the same seed and the
same answers give the same trace. Texts are tokens: what matters here is which of them begin alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

FIRST, LAST = 16, 289  # tokens of texts; those before are marks of the template
START, END, LINE, THINK = 1, 4, 5, 6
SYSTEM, USER, ASSISTANT, TOOL = 8, 9, 10, 11  # who speaks
OPENING = (START, ASSISTANT, LINE, THINK, LINE)  # of an answer that begins with thoughts


class Why(Enum):
    """What an agent does."""

    BEGINS = "a new conversation"
    GOES_ON = "the user says something else: thoughts of all turns before are dropped"
    CALLED = "a tool has answered: the thoughts that led to the call stay"
    ASKS_AGAIN = "the same prompt, another answer"
    FORKS = "another conversation goes on from the same history"
    EDITS = "an earlier turn is written anew from its middle on, and what came after it is gone"
    ONCE = "something else, that never comes again"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. Its thoughts are written only after the last message of the user."""

    speaker: int
    text: tuple[int, ...]
    thoughts: tuple[int, ...] = ()

    def written(self, thoughts: bool) -> tuple[int, ...]:
        """As the template writes it."""
        kept = (THINK, LINE, *self.thoughts) if thoughts and self.thoughts else ()
        return (START, self.speaker, LINE, *kept, *self.text, END, LINE)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of the trace."""

    number: int
    why: Why
    prompt: tuple[int, ...]
    most: int  # tokens of the answer
    conversation: Conversation | None


@dataclass(slots=True, eq=False)
class Conversation:
    """Messages of one agent, the system prompt first."""

    messages: list[Message]
    calls: int = 0  # of tools that the turn will still make
    last: Asked | None = None

    def prompt(self) -> tuple[int, ...]:
        """As the template writes it, ready for the answer."""
        user = max((at for at, message in enumerate(self.messages) if message.speaker == USER), default=0)
        written = [message.written(at > user) for at, message in enumerate(self.messages)]
        return (*(token for message in written for token in message), *OPENING)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the texts of a trace, in tokens. Ranges are for each text."""

    prose: int = 1500  # of the system prompt, before the tools
    tools: int = 20
    tool: tuple[int, int] = (60, 180)
    user: tuple[int, int] = (15, 90)
    result: tuple[int, int] = (20, 220)
    answer: tuple[int, int] = (12, 48)
    once: tuple[int, int] = (150, 500)
    calls: tuple[int, int] = (0, 4)  # of tools in a turn
    longest: int = 5500  # a conversation that reaches it is over
    together: int = 4  # conversations that ask at once


@dataclass(slots=True)
class Trace:
    """`asks` says what is asked next, all of it at once; `hears` is told each answer."""

    seed: int
    sizes: Sizes = field(default_factory=Sizes)
    open: list[Conversation] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    system: Message = field(init=False)
    _dice: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)
        tools = [token for _ in range(self.sizes.tools) for token in (LINE, *self._text(self.sizes.tool))]
        self.system = Message(SYSTEM, (*self._text((self.sizes.prose,) * 2), *tools))

    def _text(self, size: tuple[int, int]) -> tuple[int, ...]:
        return tuple(self._dice.randint(FIRST, LAST) for _ in range(self._dice.randint(*size)))

    def asks(self) -> list[Asked]:
        """One request of each of a few conversations, and now and then one that has nothing to do with them."""
        sizes, dice, asked = self.sizes, self._dice, list[Asked]()
        self.open = [one for one in self.open if len(one.prompt()) < sizes.longest]
        there = dice.sample(self.open, min(len(self.open), sizes.together - 1))
        for conversation in there:
            asked.append(self._turn(conversation))
        if len(self.open) < 2 * sizes.together:
            asked.append(self._ask(Why.BEGINS, self._begun()))
        if dice.random() < 0.4:
            prompt = (START, USER, LINE, *self._text(sizes.once), END, LINE, *OPENING)
            asked.append(Asked(len(self.asked), Why.ONCE, prompt, 8, None))
            self.asked.append(asked[-1])
        return asked

    def _begun(self) -> Conversation:
        found = Conversation([self.system, Message(USER, self._text(self.sizes.user))])
        found.calls = self._dice.randint(*self.sizes.calls)
        self.open.append(found)
        return found

    def _ask(self, why: Why, conversation: Conversation) -> Asked:
        most = self._dice.randint(*self.sizes.answer)
        conversation.last = Asked(len(self.asked), why, conversation.prompt(), most, conversation)
        self.asked.append(conversation.last)
        return conversation.last

    def _turn(self, conversation: Conversation) -> Asked:
        chance, dice, messages = self._dice.random(), self._dice, conversation.messages
        users = [at for at, message in enumerate(messages) if message.speaker == USER]
        if chance < 0.1:
            messages.pop()  # the answer
            return self._ask(Why.ASKS_AGAIN, conversation)
        if chance < 0.2:
            other = Conversation([*messages, Message(USER, self._text(self.sizes.user))])
            self.open.append(other)
            return self._ask(Why.FORKS, other)
        if chance < 0.3 and len(users) > 1:
            at = dice.choice(users[1:])
            before = messages[at].text
            text = (*before[: len(before) // 2], *self._text(self.sizes.user))
            other = Conversation([*messages[:at], replace(messages[at], text=text)])
            self.open.append(other)
            return self._ask(Why.EDITS, other)
        if conversation.calls:
            conversation.calls -= 1
            messages.append(Message(TOOL, self._text(self.sizes.result)))
            return self._ask(Why.CALLED, conversation)
        conversation.calls = dice.randint(*self.sizes.calls)
        messages.append(Message(USER, self._text(self.sizes.user)))
        return self._ask(Why.GOES_ON, conversation)

    def hears(self, asked: Asked, answer: Sequence[int]) -> None:
        """The answer: thoughts first, then what is said or which tool is called."""
        if asked.conversation is not None and asked.conversation.last is asked:
            half = len(answer) // 2
            thoughts, text = tuple(answer[:half]), tuple(answer[half:])
            asked.conversation.messages.append(Message(ASSISTANT, text, thoughts))


def play(trace: Trace, rounds: int, answers: Callable[[list[Asked]], Iterable[Sequence[int]]]) -> None:
    """So many rounds of it; `answers` gives those to all that is asked at once."""
    for _ in range(rounds):
        asked = trace.asks()
        for one, answer in zip(asked, answers(asked), strict=True):
            trace.hears(one, answer)
