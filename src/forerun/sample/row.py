"""One row of a target pass, as the sampler sees it."""

from dataclasses import dataclass

from forerun.errors import ForerunError
from forerun.sample.history import TokenHistory
from forerun.sample.masks import Words
from forerun.sample.parameters import SamplingParams


class RowError(ForerunError):
    """No token can be chosen for one row; `row` is its index in the call, so that only its request fails."""

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


@dataclass(slots=True)
class Row:
    """What decides a row besides its logits."""

    params: SamplingParams
    history: TokenHistory  # committed tokens
    drafted: tuple[int, ...] = ()  # tokens after the history and before this row
    position: int = 0  # absolute index of the token to be emitted
    allowed: Words | None = None  # what a constraint lets through


def check_best(best: float, row: int) -> None:
    """Refuse a row whose best logit cannot be chosen. `best` is NaN when any logit is."""
    if best == float("-inf"):
        raise RowError("every token is ruled out: loosen suppress, logit_bias, lang_bias or the grammar", row)
    if not best < float("inf"):
        raise RowError("the model gave a logit that is infinite or not a number: try --dtype float32", row)
