"""What a user asks for, checked once, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from forerun.draft.arms import DRAFT_CHOICES, MAX_DEPTH
from forerun.errors import ForerunError
from forerun.models.layers.media import PromptMedia
from forerun.sample.logprobs import MOST_LIKELY
from forerun.sample.parameters import SamplingParams

AcceptChoice = Literal["coupled", "rejection"]
ACCEPT_CHOICES: tuple[str, ...] = get_args(AcceptChoice)


@dataclass(frozen=True, slots=True)
class Request:
    """One generation."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    draft: str = "auto"  # one of DRAFT_CHOICES
    draft_tokens: int | None = None  # None: the engine decides
    accept: AcceptChoice = "coupled"
    kind: str = ""  # of work, as `policy/kinds.py` guesses it
    logprobs: int | None = None  # None: none; 0: of the tokens chosen; k: of the k likeliest as well
    media: PromptMedia | None = None  # what takes the place of placeholders in the prompt
    name: str = field(default="", compare=False)  # what the log calls it
    cache_salt: str = ""  # only prompts with the same one share what was computed for their beginnings
    prompt_logprobs: bool = False  # of the prompt's tokens after the first too; the likeliest as `logprobs` says

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ForerunError("the prompt is empty: give at least one token of text")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ForerunError(f"max tokens must be at least 1, not {self.max_tokens}")
        if self.draft not in DRAFT_CHOICES:
            raise ForerunError(f"draft must be one of {', '.join(DRAFT_CHOICES)}, not {self.draft!r}")
        if self.accept not in ACCEPT_CHOICES:
            raise ForerunError(f"accept must be one of {', '.join(ACCEPT_CHOICES)}, not {self.accept!r}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LIKELY:
            raise ForerunError(f"logprobs must be 0 to {MOST_LIKELY}, not {self.logprobs}")
        if self.draft_tokens is not None and not 0 <= self.draft_tokens <= MAX_DEPTH:
            raise ForerunError(f"draft tokens must be 0 to {MAX_DEPTH} or auto, not {self.draft_tokens}")

    @property
    def same_tokens(self) -> bool:
        """Are the tokens those of plain decoding, and not only their distribution?"""
        return self.accept == "coupled" or self.sampling.temperature == 0
