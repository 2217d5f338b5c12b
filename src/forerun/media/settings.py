"""What a model folder says about the preparation of its media."""

from __future__ import annotations

from forerun.weights.checkpoint import Checkpoint
from forerun.weights.config_reader import ConfigReader
from forerun.weights.folder import read_json

TOGETHER = "processor_config.json"  # of newer folders: an object for each processor
APART = {  # of older ones
    "image_processor": "preprocessor_config.json",
    "video_processor": "video_preprocessor_config.json",
    "feature_extractor": "preprocessor_config.json",
}


def processor_settings(checkpoint: Checkpoint, name: str) -> ConfigReader:
    """Settings of "image_processor", "video_processor" or "feature_extractor"; empty where a folder has none."""
    together = read_json(checkpoint.path, TOGETHER)
    if together is not None:
        reader = ConfigReader(together, str(checkpoint.path / TOGETHER))
        if name in reader:
            return reader.part(name)
    file = APART[name]
    return ConfigReader(read_json(checkpoint.path, file) or {}, str(checkpoint.path / file))
