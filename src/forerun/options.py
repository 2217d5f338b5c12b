"""What a user may ask of a generation: declared here once, for the library, the command line and a server."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from forerun.errors import ForerunError

if TYPE_CHECKING:
    from forerun.sample.parameters import SamplingParams

DraftChoice = Literal["auto", "off", "lookup", "mtp", "assistant", "model"]
AcceptChoice = Literal["coupled", "rejection"]

# What the options are about, in the order of --help.
PROMPT, SAMPLING, SPECULATION = "Prompt", "Sampling", "Speculation"


def _about(topic: str, help: str, **more: Any) -> dict[str, Any]:
    """Metadata of an option; `more`: its `flag` where that has another name, further `flags`, and the `metavar`."""
    return {"topic": topic, "help": help, **more}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """The options of `forerun.stream` and `forerun.generate`: of the right kind from the beginning.

    Whether a value is in its range is checked when a request is made of them.
    """

    system: str | None = field(default=None, metadata=_about(PROMPT, "System message."))
    raw: bool = field(default=False, metadata=_about(PROMPT, "No chat template: continue the text."))
    images: Sequence[Any] | None = field(
        default=None, metadata=_about(PROMPT, "A picture to look at; repeatable.", flag="--image", metavar="FILE")
    )
    videos: Sequence[Any] | None = field(
        default=None, metadata=_about(PROMPT, "A video to watch; repeatable.", flag="--video", metavar="FILE")
    )
    audio: Sequence[Any] | None = field(
        default=None, metadata=_about(PROMPT, "A recording to hear; repeatable.", flag="--audio", metavar="FILE")
    )
    max_tokens: int | None = field(
        default=None, metadata=_about(SAMPLING, "Longest answer; default: until the model ends.", flags=("-n",))
    )
    # None: as `SamplingParams` says, which is greedy decoding; a chat takes what the model's makers recommend.
    temperature: float | None = field(
        default=None, metadata=_about(SAMPLING, "0: the likeliest token.", flags=("--temp",))
    )
    top_p: float | None = field(default=None, metadata=_about(SAMPLING, "Keep the likeliest tokens up to P."))
    top_k: int | None = field(default=None, metadata=_about(SAMPLING, "Keep the K likeliest tokens; 0: all."))
    min_p: float | None = field(default=None, metadata=_about(SAMPLING, "Drop tokens below P × the likeliest one."))
    repetition_penalty: float | None = field(default=None, metadata=_about(SAMPLING, "Above 1: fewer repeats."))
    presence_penalty: float | None = field(default=None, metadata=_about(SAMPLING, "Taken off tokens already said."))
    frequency_penalty: float | None = field(default=None, metadata=_about(SAMPLING, "Taken off per time already said."))
    logit_bias: Mapping[int, float] | None = field(
        default=None, metadata=_about(SAMPLING, "Added to tokens.", metavar="ID=BIAS,…")
    )
    lang_bias: str | None = field(
        default=None,
        metadata=_about(
            SAMPLING, "Added to a language's tokens: ja zh ko en ru ar th hi he el.", metavar="ja=-inf,zh=-5"
        ),
    )
    suppress: Collection[int] | None = field(
        default=None, metadata=_about(SAMPLING, "Tokens never to say.", metavar="ID,ID,…")
    )
    stop: Sequence[str] | None = field(default=None, metadata=_about(SAMPLING, "End before this text; repeatable."))
    seed: int | None = field(default=None, metadata=_about(SAMPLING, "Default: a fresh one, reported."))
    draft: DraftChoice = field(default="auto", metadata=_about(SPECULATION, "Who drafts."))
    draft_tokens: int | Literal["auto"] = field(
        default="auto", metadata=_about(SPECULATION, "Drafted per round.", metavar="N|auto")
    )
    accept: AcceptChoice = field(
        default="coupled", metadata=_about(SPECULATION, "coupled: same text per seed; rejection: same distribution.")
    )
    prove: bool = field(
        default=False, metadata=_about(SPECULATION, "Decode again without drafts, and compare.", flag="--prove")
    )

    def __post_init__(self) -> None:
        for name in ("system", "lang_bias"):
            _require(name, "text", getattr(self, name), isinstance(getattr(self, name), str | None))
        for name in ("raw", "prove"):
            _require(name, "True or False", getattr(self, name), isinstance(getattr(self, name), bool))
        _require("logit_bias", "biases by token id", self.logit_bias, isinstance(self.logit_bias, Mapping | None))
        _require("suppress", "several token ids", self.suppress, _is_several(self.suppress))
        texts = isinstance(self.stop, str) or (_is_several(self.stop) and all(isinstance(t, str) for t in self.stops))
        _require("stop", "a text or several", self.stop, texts)
        object.__setattr__(self, "max_tokens", whole_number("max_tokens", self.max_tokens))
        object.__setattr__(self, "draft_tokens", whole_number("draft_tokens", self.draft_tokens, "auto"))
        if self.prove and self.accept == "rejection":
            raise ForerunError(
                "rejection keeps the distribution and not the tokens, so there is nothing to prove: drop one of them"
            )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> GenerationOptions:
        """From names and values; a name that is none of ours is refused."""
        known = [entry.name for entry in fields(cls)]
        for name in given:
            if name not in known:
                raise ForerunError(f"there is no option {name!r}: choose from {', '.join(known)}")
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """Names and values, as `forerun.stream` takes them."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    def with_defaults(self, defaults: Mapping[str, float]) -> GenerationOptions:
        """With values for what is not set."""
        missing: dict[str, Any] = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return replace(self, **missing)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings; a single one may be given as it is."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def media(self) -> dict[Literal["image", "video", "audio"], list[Any]]:
        """Media of the prompt by kind: paths, data URIs, bytes or pictures; a single one may be given as it is."""
        return {"image": _several(self.images), "video": _several(self.videos), "audio": _several(self.audio)}

    def sampling(self, language_bias: Mapping[int, float] | None = None) -> SamplingParams:
        """For the sampler, every value checked; `language_bias` is what `lang_bias` means in the model's vocabulary."""
        from forerun.sample.parameters import SamplingParams, fresh_seed

        wanted = {entry.name for entry in fields(SamplingParams)}
        values = {name: value for name, value in self.to_dict().items() if name in wanted and value is not None}
        values["logit_bias"] = {**(language_bias or {}), **(self.logit_bias or {})}  # a single token's own bias wins
        values["suppress"] = () if self.suppress is None else self.suppress
        values["seed"] = fresh_seed() if self.seed is None else self.seed
        return SamplingParams(**values)


def _require(name: str, wanted: str, value: object, good: bool) -> None:
    if not good:
        raise ForerunError(f"{name} must be {wanted}, not {value!r:.60}")


def _is_several(value: object) -> bool:
    return value is None or (isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping))


def whole_number(name: str, value: Any, other: str | None = None) -> Any:
    """An int of whatever counts as one, numpy's among them; None and `other` stay what they are."""
    if value is None or value == other:
        return value
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    _require(name, "a whole number", value, number is not None and not isinstance(value, bool))
    return number


def _several(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]
