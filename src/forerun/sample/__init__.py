"""Sampling: the token plain decoding would emit, and how drafts are checked against it.

`choose` is a pure function of a row's logits and its `Row`. Nothing here keeps generator state, so order, batch and
width do not matter. The files, in the order a row meets them:

    parameters          what a request asks for
    history, row        what a row knows besides its logits
    processors          bias, masks, penalties
    noise               keyed randomness
    reference           the vectorised body in torch, for any device
    compiled, kernels   the same in numba, for CPU
    choose              picks the body
    acceptance          coupled and rejection
    language            token sets by Unicode script
"""

from forerun.sample.acceptance import accept_coupled, accept_rejection, draw
from forerun.sample.choose import choose, choose_row, probabilities
from forerun.sample.history import TokenHistory
from forerun.sample.language import language_bias, parse_language_bias
from forerun.sample.parameters import SamplingParams, fresh_seed
from forerun.sample.row import Row, RowError

__all__ = [
    "Row",
    "RowError",
    "SamplingParams",
    "TokenHistory",
    "accept_coupled",
    "accept_rejection",
    "choose",
    "choose_row",
    "draw",
    "fresh_seed",
    "language_bias",
    "parse_language_bias",
    "probabilities",
]
