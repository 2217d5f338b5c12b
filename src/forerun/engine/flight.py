"""A round under way on a device: what it was captured for, what it costs, and what may run there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.engine.controller import Controller, Decision
from forerun.engine.costs import CostTable
from forerun.engine.request import Request
from forerun.engine.round import Turn
from forerun.errors import ForerunError
from forerun.kernels.interface import LARGEST_TOP_K
from forerun.sample.row import check_best

UPLOADED = (2, 4, 8, 16)  # widths of rounds whose drafts the host makes; fewer drafts leave rows that nobody looks at


class Shape(NamedTuple):
    """What a round is captured for."""

    lanes: int
    width: int
    headed: bool  # does the head follow?
    filtered: bool
    drafts: int  # the head makes for the next round

    @property
    def rows(self) -> int:
        return self.lanes * self.width

    @property
    def postpones(self) -> bool:
        """Is its one row of each lane put by, for the head to read later?"""
        return self.headed and self.width == 1 and not self.drafts


class Wish(NamedTuple):
    """How to go on after the round under way, if it emits what is expected."""

    decision: Decision
    expected: list[int]  # the beginning of it counts

    def holds(self, tokens: list[int]) -> bool:
        """Did it?"""
        return all(token == wanted for token, wanted in zip(tokens, self.expected, strict=False))


@dataclass(slots=True)
class Flight:
    """A round under way."""

    turns: list[Turn]
    shape: Shape
    drafts: list[int]  # real drafts in each lane
    began: float  # when the host began to work for it
    launched: float
    waiting: float  # seconds that the device had nothing to do for want of the host's drafts
    drafting: float  # seconds the host spent on drafts
    result: Tensor  # [lanes, width + 2] in host memory: chosen tokens, accepted drafts, whether a row was bad
    events: list[torch.cuda.Event]  # its beginning and its end, on a GPU
    repeats: int  # rounds since the sequences or the way to run them changed
    typical: bool  # its time tells what such rounds cost: nothing was compiled or captured for it
    wishes: list[Wish] | None = None  # what to do after it, where somebody has thought about that

    def seconds(self, now: float) -> float:
        """What it took the device, however late the host looks at it."""
        return self.events[0].elapsed_time(self.events[1]) / 1e3 if self.events else now - self.launched


def uploads(turn: Turn) -> bool:
    """Does the host draft for it?"""
    return turn.decision.drafter not in (None, "mtp")


def tries(turn: Turn) -> bool:
    """Does it run an arm that is not in use, to see what comes of it?"""
    policy = turn.sequence.policy
    return isinstance(policy, Controller) and policy.trial is not None and policy.trial == turn.decision.arm


def width_of(turns: list[Turn], depths: list[int]) -> int:
    """Rows of every lane, when the turns have so many drafts."""
    widths = [1 + depth for depth in depths]
    for index, turn in enumerate(turns):
        if uploads(turn) and depths[index]:
            widths[index] = next(width for width in UPLOADED if width > depths[index])
    return max(widths)


def learn_costs(costs: CostTable, flight: Flight, took: float) -> None:
    """A round is a pass, and drafts for the next one by the head: what is known of one tells the other.

    `took`: since its launch. Who drafts on the host pays for the wait before that; other rounds start ahead.
    """
    count, width = len(flight.turns), flight.shape.width
    turn = flight.turns[0] if count == 1 else None
    if turn is not None and costs.known and flight.shape.drafts and width > 1 and not uploads(turn):
        costs.learn_draft("mtp", flight.shape.drafts, took - costs.pass_seconds(width))
        return
    if flight.shape.drafts and costs.known:
        took -= min(costs.draft_seconds("mtp", flight.shape.drafts), took / 2)
    drafter, drafted = (None, 0) if turn is None else (turn.decision.drafter, flight.drafts[0])
    costs.learn(drafter, drafted, count * width, flight.waiting, took, sequences=count)


def runs_on_device(request: Request) -> bool:
    """The device changes no logits, and accepts by comparing."""
    params = request.sampling
    plain = not params.penalised and not len(params.bias_ids) and (params.greedy or params.top_k <= LARGEST_TOP_K)
    return plain and request.accept == "coupled"


def bad_row() -> ForerunError:
    """What the general way would have said."""
    try:
        check_best(float("nan"), 0)
    except ForerunError as error:
        return error
    raise AssertionError("NaN is never a best logit")
