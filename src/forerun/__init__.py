"""forerun: speculative decoding that is invisible and never slower.

>>> import forerun
>>> model = forerun.load("smollm2")                                          # doctest: +SKIP
>>> forerun.generate(model, "What is the capital of France?").text           # doctest: +SKIP
'The capital of France is Paris.'
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from forerun.errors import ForerunError
from forerun.options import GenerationOptions

if TYPE_CHECKING:
    from pathlib import Path

    from forerun.inspection import CheckReport
    from forerun.language_model import Generation, LanguageModel, Prompt
    from forerun.progress import Progress
    from forerun.response import Response

__all__ = ["ForerunError", "GenerationOptions", "__version__", "generate", "inspect_model", "load", "stream"]

try:
    __version__ = version("forerun")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0.1.0"


def load(
    model: str | Path = "smollm2",
    *,
    device: str = "auto",
    dtype: str = "auto",
    quantize: str = "auto",
    max_context: int | None = None,
    memory: str | float | None = None,
    draft_model: str | Path | None = None,
    head: str | Path | None = "auto",
    assistant_position: str = "n-1",
    prefix_cache: bool = True,
    slowdown: float = 2.5,
    cache: str | Path | None = None,
    progress: Progress | None = None,
) -> LanguageModel:
    """Load a model: a folder, a GGUF file, a hub id or the built-in `smollm2`.

    On CPU weights are rounded to int8; `dtype="float32"` or `quantize="none"` keeps full precision. `draft_model` names
    a smaller model with the same tokenizer for `draft="model"`. `head` is a folder with an MTP head for `draft="mtp"`;
    "auto" takes the model's own or one that comes with forerun, None does without. `draft_model` may also name an
    assistant for `draft="assistant"`; one beside the model is found. `assistant_position`: where its queries stand, at
    the last committed token ("n-1") or at the pending one ("n"); the text is the same. `memory` is for keys and values:
    a share of what is free (0.5) or bytes ("6G"); by default a GPU gives all but a tenth, a CPU enough for 8 contexts.
    `prefix_cache` keeps texts there while the room is not needed, so that the next prompt that begins alike is read
    from where it differs. `cache` names a file that keeps them between runs: it is read now and written when the model
    is closed (`with forerun.load(…) as model:`, or `model.close()`). `slowdown`: times as long as usual that a token of
    an answer may take while prompts of others are read; more of it lets those begin sooner.
    """
    from forerun.loading import load_model

    return load_model(
        model,
        device=device,
        dtype=dtype,
        quantize=quantize,
        max_context=max_context,
        memory=memory,
        draft_model=draft_model,
        head=head,
        assistant_position=assistant_position,
        prefix_cache=prefix_cache,
        slowdown=slowdown,
        cache=cache,
        progress=progress,
    )


def stream(model: LanguageModel, prompt: Prompt, **options: Any) -> Generation:
    """Generate chunk by chunk; the last chunk carries the summary.

    `prompt` is text, a list of messages or a list of token ids. The options are those of `GenerationOptions`, and
    `progress`. Models that see or hear take `images`, `videos` and `audio` (paths, bytes, data URIs), or messages with
    parts such as `{"type": "image", "path": "photo.jpg"}`.

    >>> with forerun.stream(model, "Count to five.", max_tokens=16) as answer:
    ...     text = "".join(chunk.text for chunk in answer)
    >>> text == answer.response().text
    True
    """
    return _loaded(model).start(prompt, **options)


def generate(model: LanguageModel, prompt: Prompt, **options: Any) -> Response:
    """Generate a whole answer; the options are those of `stream`.

    >>> plain = forerun.generate(model, "Count to five.", max_tokens=16, draft="off")
    >>> drafted = forerun.generate(model, "Count to five.", max_tokens=16, draft="lookup")
    >>> plain.tokens == drafted.tokens
    True
    """
    from forerun.language_model import collect

    return collect(_loaded(model).start(prompt, **options))


def _loaded(model: LanguageModel) -> LanguageModel:
    if not hasattr(model, "start"):
        raise ForerunError(f"load the model first: forerun.load returns what is needed here, not {model!r:.60}")
    return model


def inspect_model(model: str | Path, **options: Any) -> CheckReport:
    """What `forerun check` prints: family, size, memory plan, and the exactness probe."""
    from forerun.inspection import inspect_model as inspect

    return inspect(model, **options)
