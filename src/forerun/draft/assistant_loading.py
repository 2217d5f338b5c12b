"""From a folder with an assistant to one that runs beside its target, and from a wish to that folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from forerun.draft.arms import ASSISTANT, MODEL, MTP
from forerun.errors import ForerunError
from forerun.models.gemma4_assistant import build_assistant, fitting_layers, read_assistant
from forerun.models.layers.assistant import Assistant
from forerun.models.layers.decoder import Decoder
from forerun.weights.assistants import MODEL_TYPES, assistant_beside, is_assistant
from forerun.weights.checkpoint import open_checkpoint
from forerun.weights.config import read_config
from forerun.weights.config_reader import ConfigReader
from forerun.weights.described import config_place
from forerun.weights.find import find


@dataclass(frozen=True, slots=True)
class FoundAssistant:
    """An assistant, or why there is none; and what a user who lets forerun choose should know."""

    assistant: Assistant | None = None
    path: Path | None = None  # of the assistant
    missing: dict[str, str] = field(default_factory=dict)  # by the name of a drafter
    warnings: list[str] = field(default_factory=list)


def load_assistant(folder: Path, decoder: Decoder, position: str) -> Assistant:
    """The assistant in a folder. Whether it fits is known before its weights are read."""
    values = read_config(folder)
    if values["model_type"] not in MODEL_TYPES:
        raise ForerunError(f"{folder} is no assistant: its model type is {values['model_type'][:40]!r}")
    config = read_assistant(ConfigReader(values, config_place(folder)))
    fitting_layers(config, decoder.config)
    return build_assistant(config, open_checkpoint(folder), decoder, position)


def find_assistant(named: Path | None, model: Path, decoder: Decoder, position: str) -> FoundAssistant:
    """The one that a user named, who must get it or hear why not; else one that lies beside the model, if it works.

    `model`: its folder or GGUF file.
    """
    if named is not None:
        if is_assistant(named):
            reason = f"{named} is an assistant: use --draft assistant"
            return FoundAssistant(load_assistant(named, decoder, position), named, {MODEL.drafter: reason})
        return FoundAssistant(missing={ASSISTANT.drafter: f"{named} is a model of its own: use --draft model"})
    beside = assistant_beside(model)
    if beside is None:
        return FoundAssistant()
    try:
        return FoundAssistant(load_assistant(find(str(beside)), decoder, position), beside)
    except ForerunError as error:
        reasons = dict.fromkeys((ASSISTANT.drafter, MTP.drafter), str(error))
        return FoundAssistant(None, beside, reasons, [f"no drafts of the assistant: {error}"])
