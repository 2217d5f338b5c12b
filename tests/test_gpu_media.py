"""Towers where the decoder is: on a GPU in bfloat16, as on a CPU. Needs neither Pillow nor PyAV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import NoText, finish
from tiny_media import random_media_gemma, random_media_qwen, random_unified, save_media_gemma, save_media_qwen

import forerun
from forerun.engine.request import Request
from forerun.media.expansion import Prepared
from forerun.media.loading import media_family
from forerun.media.parts import Kind
from forerun.models.layers.media import MediaRun, PromptMedia
from forerun.sample.parameters import SamplingParams
from forerun.weights.checkpoint import open_checkpoint

PLACES = [
    pytest.param("cpu", torch.float32, id="cpu"),
    pytest.param("cuda", torch.bfloat16, id="gpu", marks=pytest.mark.gpu),
]
MODELS: dict[str, Any] = {
    "E4B": lambda folder: save_media_gemma(folder, random_media_gemma("E4B")),
    "31B": lambda folder: save_media_gemma(folder, random_media_gemma("31B")),
    "12B": lambda folder: save_media_gemma(folder, random_unified()),
    "dense": lambda folder: save_media_qwen(folder, random_media_qwen(False)),
    "sparse": lambda folder: save_media_qwen(folder, random_media_qwen(True)),
}


def inputs(model: str, kind: Kind) -> Any:
    """What a picture of about 96 x 144 pixels, or a second of noise, is when a tower gets it."""
    noise = torch.rand(200_000, generator=torch.Generator().manual_seed(1))
    if kind == "audio":
        sound = (noise[:16_000] - 0.5).numpy()
        if model == "12B":
            return (noise[:16_000].view(25, 640) - 0.5,)
        from transformers import Gemma4AudioFeatureExtractor

        made = Gemma4AudioFeatureExtractor()([sound], return_tensors="pt")
        return made["input_features"], made["input_features_mask"].bool()
    if model in ("dense", "sparse"):
        return noise[: 48 * 1536].view(48, 1536) * 2 - 1, (1, 6, 8)
    side, columns, rows = (48, 3, 2) if model == "12B" else (16, 9, 6)
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    patches = noise[: rows * columns * side * side * 3].view(1, rows * columns, -1)
    return patches, torch.stack([x.reshape(-1), y.reshape(-1)], dim=1)[None]


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(
    ("model", "kind"), [(m, "image") for m in MODELS] + [("E4B", "audio"), ("12B", "audio")], ids=str
)
@torch.inference_mode()
def test_towers_run_beside_the_decoder(model: str, kind: Kind, device: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder, rows = MODELS[model](tmp_path), []
    for place, number in ((device, dtype), ("cpu", torch.float32)):
        family = media_family(open_checkpoint(folder), None, torch.device(place), number)
        assert family is not None
        family.load(kind)
        prepared = Prepared(kind, [], [], inputs(model, kind))
        rows += [family.encode(prepared), family.encode(prepared)]
    assert torch.equal(rows[0], rows[1]), "the same file gives the same bits"
    assert (rows[0].device.type, rows[0].dtype, rows[0].shape) == (device, dtype, rows[2].shape)
    mine, theirs = rows[0].float().cpu(), rows[2]
    tolerance = 1e-6 if dtype == torch.float32 else 0.1 * float(theirs.std())
    assert float((mine - theirs).abs().mean()) <= tolerance


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("model", ["E4B", "31B", "12B", "dense"])
def test_rows_in_host_memory_are_read_by_the_device(
    model: str, device: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    name = str(dtype).removeprefix("torch.")
    loaded = forerun.load(str(MODELS[model](tmp_path)), device=device, dtype=name, max_context=512)
    hidden, prompt = loaded.engine.model.config.hidden, [(37 * n + 11) % 250 for n in range(90)]
    answers = []
    for seed, draft in ((0, "off"), (0, "lookup"), (1, "off")):
        noise = torch.randn(40, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)
        media = PromptMedia([MediaRun(5, noise[:30], whole=model != "E4B"), MediaRun(60, noise[30:])])
        request = Request(tuple(prompt), SamplingParams(), 12, draft=draft, media=media)
        sequence = loaded.engine.submit(request, NoText())
        finish(loaded.engine, [sequence])
        assert sequence.error is None and sequence.request.media is None
        answers.append(sequence.answer)
        loaded.engine.release(sequence)
    assert answers[0] == answers[1] != answers[2]
