"""A model of this process in the form that the routes want."""

from __future__ import annotations

from forerun.draft.arms import SERVED
from forerun.language_model import LanguageModel
from forerun.serve.model_service import LoadedModel
from forerun.serve.settings import ServeSettings


def loaded_model(model: LanguageModel, settings: ServeSettings) -> LoadedModel:
    """Once, when it has been loaded."""
    engine = model.engine
    return LoadedModel(
        tokenizer=model.tokenizer,
        context=engine.context,
        vocab=engine.vocab,
        stop_ids=model.stop_ids,
        generation_defaults=model.generation_defaults,
        about={
            "device": str(model.machine.device),
            "guaranteed": model.probe.guaranteed,
            "drafters": [name for name in SERVED if name in engine.drafters],
        },
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
        media=model.media,
    )
