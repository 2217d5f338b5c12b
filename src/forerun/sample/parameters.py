"""What a request asks of the sampler, checked once when it is made."""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from forerun.errors import ForerunError

COLDEST = 1e-6  # below this a temperature is not told from 0, and 1 / T would leave the range of useful numbers
HOTTEST = 1e6
LARGEST_BIAS = 1e30  # a larger one would overflow a float32 logit
LARGEST_ID = 2**31


def fresh_seed() -> int:
    """A seed for a request that brought none; the response says which. 53 bits, so that JSON carries it unharmed."""
    return secrets.randbits(53)


def _number(name: str, value: object, low: float, high: float) -> float:
    """`value` as a float in [low, high], or a one-line error. NaN fails the comparison."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ForerunError(f"{name} must be a number, not {value!r}")
    if not low <= value <= high:
        raise ForerunError(f"{name} must be {_range(low, high)}, not {value}")
    return float(value)


def _range(low: float, high: float) -> str:
    if math.isinf(low) and math.isinf(high):
        return "a finite number"
    return f"at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"


def _integer(name: str, value: object, limit: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < limit:
        raise ForerunError(f"{name} must be a whole number from 0 to {limit - 1}, not {value!r}")
    return int(value)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen; the defaults are greedy decoding. `seed` and `choice` key the noise.

    >>> SamplingParams(temperature=0.8, top_p=0.95, seed=7).greedy
    False
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    suppress: frozenset[int] = frozenset()
    seed: int = 0
    choice: int = 0
    # bias and suppression as arrays, sorted by id: made once, because a language bias may name half the vocabulary
    bias_ids: npt.NDArray[np.int64] = field(init=False, repr=False, compare=False)
    bias_values: npt.NDArray[np.float64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        keep = {
            "temperature": _number("temperature", self.temperature, 0.0, HOTTEST),
            "top_p": _number("top_p", self.top_p, 0.0, 1.0),
            "top_k": _integer("top_k", self.top_k, LARGEST_ID),
            "min_p": _number("min_p", self.min_p, 0.0, 1.0),
            "repetition_penalty": _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0),
            "presence_penalty": _number("presence_penalty", self.presence_penalty, -100.0, 100.0),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty, -100.0, 100.0),
            "logit_bias": _checked_bias(self.logit_bias),
            "suppress": frozenset(_integer("a suppressed token id", i, LARGEST_ID) for i in self.suppress),
            "seed": _integer("seed", self.seed, 2**64),
            "choice": _integer("choice", self.choice, 2**32),
        }
        if 0 < self.temperature < COLDEST:
            raise ForerunError(f"temperature must be 0 or at least {COLDEST:g}, not {self.temperature}")
        for name, value in keep.items():
            object.__setattr__(self, name, value)
        self._remember_bias_arrays()

    def _remember_bias_arrays(self) -> None:
        merged = dict(self.logit_bias) | dict.fromkeys(self.suppress, -math.inf)
        ids = np.array(sorted(merged), dtype=np.int64)
        object.__setattr__(self, "bias_ids", ids)
        object.__setattr__(self, "bias_values", np.array([merged[i] for i in ids.tolist()], dtype=np.float64))

    @property
    def greedy(self) -> bool:
        """Temperature 0: no noise, no filters, the best token."""
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p can drop a token that would be drawn otherwise."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalised(self) -> bool:
        """Whether the logits depend on the tokens seen so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def needs_edits(self) -> bool:
        """Whether bias, suppression or penalties change the logits; a grammar mask is the row's own."""
        return self.penalised or len(self.bias_ids) > 0

    def check_vocabulary(self, vocab: int) -> None:
        """Refuse ids the model does not have. The sampler itself ignores them."""
        for name, ids in (("logit_bias", self.logit_bias), ("suppress", self.suppress)):
            if ids and max(ids) >= vocab:
                raise ForerunError(f"{name} names token {max(ids)}, but the vocabulary ends at {vocab - 1}")


def _checked_bias(bias: Mapping[int, float]) -> dict[int, float]:
    """A private copy; -inf rules a token out, +inf is refused because two of them cannot be compared."""
    checked: dict[int, float] = {}
    for token, value in bias.items():
        token = _integer("a token id in logit_bias", token, LARGEST_ID)
        low = -math.inf if value == -math.inf else -LARGEST_BIAS
        checked[token] = _number(f"the logit_bias of token {token}", value, low, LARGEST_BIAS)
    return checked
