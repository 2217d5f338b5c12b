"""Trained MTP heads: a folder with head.safetensors and a config.json that says which model it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError
from forerun.weights.checkpoint import Checkpoint
from forerun.weights.config_reader import ConfigReader
from forerun.weights.fingerprint import fingerprint
from forerun.weights.folder import file_inside, read_json

FORMAT = "forerun-mtp-head"
VERSION = 2  # of heads that are written: the layer's matrices are in 8 bits
VERSIONS = (1, VERSION)  # of heads that are read; in the first one nothing is in 8 bits
WEIGHTS = "head.safetensors"
PACKAGED = Path(__file__).parent.parent / "data" / "heads"


@dataclass(frozen=True, slots=True)
class TargetShape:
    """What a head must have in common with its model."""

    model_type: str
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int

    def __str__(self) -> str:
        return (
            f"{self.model_type} with hidden size {self.hidden_size}, {self.num_hidden_layers} layers "
            f"and {self.vocab_size} tokens"
        )


@dataclass(frozen=True, slots=True)
class HeadFolder:
    """A head on disk: its description is checked, its tensors are not read yet."""

    path: Path
    target_hash: str
    target: TargetShape
    taps: tuple[int, ...]
    layer: Mapping[str, Any]  # the block's shape, in the words of the target's config.json

    def open(self) -> Checkpoint:
        """Its tensors."""
        file = file_inside(self.path, WEIGHTS)
        if file is None:
            raise ForerunError(f"the MTP head {self.path} has no {WEIGHTS}")
        return Checkpoint(self.path, {"model_type": f"{self.target.model_type} MTP head"}, [file])


@dataclass(frozen=True, slots=True)
class FoundHead:
    """A head for a model, and what a user should know about the match."""

    folder: HeadFolder
    warning: str | None


def shape_of(checkpoint: Checkpoint) -> TargetShape:
    """The shape of a model, as heads record it."""
    return _shape(checkpoint.reader.text_model())


def read_head(folder: Path) -> HeadFolder:
    """Read and check a head's description."""
    where = f"the MTP head {folder}"
    if not folder.is_dir():
        raise ForerunError(f"{where} is not a folder")
    config = read_json(folder, "config.json")
    if config is None:
        raise ForerunError(f"{where} has no config.json")
    if config.get("format") != FORMAT or config.get("version") not in VERSIONS:
        found = f"{config.get('format')!r} version {config.get('version')!r}"[:80]
        known = " or ".join(map(str, VERSIONS))
        raise ForerunError(
            f"{where} is of format {found}, expected {FORMAT!r} version {known}: a later one needs a newer forerun"
        )
    settings = ConfigReader(config, where)
    target = settings.part("target")
    shape = _shape(target)
    taps = settings.integers("taps", (), high=shape.num_hidden_layers - 1)
    if len(set(taps)) != len(taps):
        raise settings.wrong("taps", "different layers")
    return HeadFolder(folder, target.text("hash", "")[:64], shape, tuple(taps), settings.part("layer").values)


def find_head(checkpoint: Checkpoint, folder: Path | None) -> FoundHead | None:
    """The head in `folder`, or the packaged one that fits the model best (None when there is none).

    A head of the very same weights is used as it is; one of other weights of the same shape may draft worse, which is
    worth a warning; one of another shape cannot run.
    """
    if folder is not None:
        head, wanted = read_head(folder), shape_of(checkpoint)
        if head.target != wanted:
            raise ForerunError(f"the MTP head {folder} is for {head.target}, but {checkpoint.path} is {wanted}")
        return _match(head, fingerprint(checkpoint))
    family = checkpoint.reader.text_model().text("model_type", "")
    known = [head for head in packaged_heads() if head.target.model_type == family]
    # Configs of families that have none may leave out what a shape needs.
    fitting = [head for head in known if head.target == shape_of(checkpoint)]
    if not fitting:
        return None
    own = fingerprint(checkpoint)
    return min((_match(head, own) for head in fitting), key=lambda found: found.warning is not None)


def packaged_heads() -> list[HeadFolder]:
    """Heads that come with forerun."""
    return [read_head(file.parent) for file in sorted(PACKAGED.glob("*/config.json"))]


def _match(head: HeadFolder, own: str) -> FoundHead:
    if head.target_hash == own:
        return FoundHead(head, None)
    warning = (
        f"the MTP head {head.path.name} was trained for other weights of the same shape: "
        "the text stays right, but drafts may be worse"
    )
    return FoundHead(head, warning)


def _shape(config: ConfigReader) -> TargetShape:
    sizes = [config.integer(name) for name in ("hidden_size", "vocab_size", "num_hidden_layers")]
    return TargetShape(config.text("model_type")[:40], *sizes)
