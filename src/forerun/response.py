"""What a generation gives back: a stream of chunks, and a summary."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from forerun.engine.sequence import ArmUse
from forerun.proof import Proof


@dataclass(frozen=True, slots=True)
class Response:
    """The whole answer and what it took."""

    text: str
    tokens: list[int]  # ids of the answer, the end token not among them
    finish_reason: str  # "stop", "length" or "cancelled"
    prompt_tokens: int
    completion_tokens: int
    rounds: int  # target passes after the prompt
    drafted: int
    accepted: int
    seconds: dict[str, float]  # load, prefill, decode; draft and verify are parts of decode
    tokens_per_second: float  # decoding only
    draft: str  # the arm that drafted, or "off"
    guaranteed: bool  # same tokens as plain decoding, as checked when the model was loaded
    seed: int
    arms: dict[str, ArmUse] = field(default_factory=dict)  # rounds, drafts and seconds of each; "plain" among them
    per_position: list[list[int]] = field(default_factory=list)  # [drafts that reached a position, accepted there]
    seconds_saved: float | None = None  # against plain decoding, by plain rounds measured in this process
    warnings: list[str] = field(default_factory=list)
    accept: str = "coupled"  # how drafts were checked, or "rejection"
    cached_tokens: int = 0  # of the prompt: they were in the cache and not read again
    proof: Proof | None = None  # where it was asked for, and the answer came to its end

    @property
    def tokens_per_round(self) -> float:
        """Tokens a target pass gave; the first token, which comes out of the prompt, is not counted."""
        return 1 + self.accepted / self.rounds if self.rounds else 0.0

    @property
    def accepted_per_position(self) -> list[float]:
        """Of the drafts made for a position, the share that was accepted together with all before it."""
        return [accepted / drafted for drafted, accepted in self.per_position]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        more = {"tokens_per_round": self.tokens_per_round, "accepted_per_position": self.accepted_per_position}
        return asdict(self) | more | {"proof": None if self.proof is None else self.proof.to_dict()}


@dataclass(frozen=True, slots=True)
class Rollout:
    """What `LanguageModel.generate_tokens` gives of one answer."""

    prompt: list[int]
    tokens: list[int]  # the end token among them, where one ended it: the model has chosen that, too
    logprobs: list[float]  # of each token, by the model's own logits before anything edits or cools them
    finish_reason: str  # "stop" or "length"
    response: Response  # without text; its tokens are without the end token


@dataclass(frozen=True, slots=True)
class Chunk:
    """One token as it comes; the last chunk has none, and carries the summary."""

    text: str
    token: int | None
    from_draft: bool = False
    finish_reason: str | None = None
    response: Response | None = None
    arm: str = ""  # that drafted the token; empty where the model itself chose it
