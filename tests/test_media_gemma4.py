"""Pictures, films and sound in prompts of Gemma 4: the same first logits as transformers, and drafts change nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from engines import VOCAB, decoder, engine
from media_checks import TEXT, check_drafts, last_logits, reader_of
from media_files import encoded, film_file, part, picture, sound_file
from PIL import Image
from tiny_gemma import random_assistant, save_assistant
from tiny_media import GEMMA_IDS, SOFT_TOKENS, random_media_gemma, random_unified, save_media_gemma
from torch import Tensor
from transformers import (
    AutoTokenizer,
    Gemma4AudioFeatureExtractor,
    Gemma4ImageProcessorPil,
    Gemma4UnifiedAudioFeatureExtractor,
)

from forerun.draft.assistant import AssistantDrafter
from forerun.draft.assistant_loading import load_assistant
from forerun.errors import ForerunError
from forerun.media.parts import MediaPart, MediaPrompt
from forerun.models.layers.decoder import Decoder

IMAGE, VIDEO, AUDIO = (GEMMA_IDS[f"{kind}_token_id"] for kind in ("image", "video", "audio"))
BOI, EOI, BOA, EOA = (GEMMA_IDS[name] for name in ("boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_index"))


@dataclass
class Pair:
    oracle: Any
    folder: Path
    model: Decoder


@pytest.fixture(scope="module", params=["E4B", "31B", "12B"])
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=["E4B", "12B"])
def hearing(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp(request.param))


def make_pair(variant: str, folder: Path) -> Pair:
    oracle = random_unified() if variant == "12B" else random_media_gemma(variant)
    save_media_gemma(folder, oracle, published=variant == "12B")
    return Pair(oracle, folder, decoder(folder, quantize=False))


def prepared(pair: Pair, images: Sequence[Image.Image]) -> Any:
    """By transformers' own processor, which pads pictures to the same number of patches."""
    made = Gemma4ImageProcessorPil(max_soft_tokens=SOFT_TOKENS)(list(images), return_tensors="pt")
    if pair.oracle.config.model_type == "gemma4":
        return made
    larger = [nine_in_one(*each) for each in zip(made["pixel_values"], made["image_position_ids"], strict=True)]
    return made | {
        "pixel_values": torch.stack([patches for patches, _ in larger]),
        "image_position_ids": torch.stack([positions for _, positions in larger]),
    }


def nine_in_one(patches: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Patches of 48 pixels a side made of those of 16, by way of the whole picture; the processor needs torchvision."""
    width, height = (int(count) for count in positions.max(dim=0).values + 1)
    whole = torch.zeros(height * 16, width * 16, 3)
    for patch, (x, y) in zip(patches, positions.tolist(), strict=True):
        if x >= 0:
            whole[16 * y : 16 * y + 16, 16 * x : 16 * x + 16] = patch.reshape(16, 16, 3)
    larger, places = torch.zeros(SOFT_TOKENS, 48 * 48 * 3), torch.full((SOFT_TOKENS, 2), -1)
    for index in range(height * width // 9):
        y, x = divmod(index, width // 3)
        larger[index] = whole[48 * y : 48 * y + 48, 48 * x : 48 * x + 48].flatten()
        places[index] = torch.tensor([x, y])
    return larger, places


def listened(pair: Pair, data: bytes) -> dict[str, Tensor]:
    """Sound of a WAV file by transformers' own extractor."""
    samples = numpy.frombuffer(data[44:], "<i2").astype(numpy.float32) / 32768
    unified = pair.oracle.config.model_type == "gemma4_unified"
    extractor = Gemma4UnifiedAudioFeatureExtractor() if unified else Gemma4AudioFeatureExtractor()
    made = extractor([samples], return_tensors="pt")
    return {"input_features": made["input_features"], "input_features_mask": made["input_features_mask"].bool()}


@torch.inference_mode()
def expected_logits(oracle: Any, ids: Sequence[int], **inputs: Any) -> Tensor:
    """With the masks of `generate`: without them the model without towers lets pictures see themselves in all layers,
    which transformers has corrected in the other one (its pull request 46850). Frames go in as pictures: models
    make no difference, and how to hand films over differs between versions.
    """
    ids = [IMAGE if token == VIDEO else token for token in ids]
    kinds = torch.tensor([[{IMAGE: 1, AUDIO: 3}.get(token, 0) for token in ids]])
    place, x = torch.arange(len(ids))[None], torch.zeros(1, len(ids), 1)
    masks = oracle.create_masks_for_generate(oracle.config, x, None, None, place, kinds)
    logits: Tensor = oracle(input_ids=torch.tensor([list(ids)]), attention_mask=masks, **inputs).logits[0, -1]
    return logits


def agree(pair: Pair, prompt: MediaPrompt, ids: Sequence[int], **inputs: Any) -> None:
    assert prompt.ids == list(ids)
    expected = expected_logits(pair.oracle, ids, **inputs)[:VOCAB]  # the rest are placeholders, which are never chosen
    torch.testing.assert_close(last_logits(pair.model, prompt)[:VOCAB], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("sizes", [[(60, 40)], [(90, 30), (31, 77), (48, 48)], [(700, 4)]], ids=str)
def test_pictures(pair: Pair, sizes: list[tuple[int, int]]) -> None:
    images = [picture(*size, seed=seed) for seed, size in enumerate(sizes)]
    made = prepared(pair, images)
    ids, expected = [1, *TEXT[:9]], [1, *TEXT[:9]]
    for count in made["num_soft_tokens_per_image"]:
        ids += [IMAGE, 20, 21]
        expected += [BOI, *[IMAGE] * count, EOI, 20, 21]
    prompt = reader_of(pair.folder).read(ids, [part("image", encoded(image)) for image in images])
    inputs = {"pixel_values": made["pixel_values"], "image_position_ids": made["image_position_ids"]}
    agree(pair, prompt, expected, **inputs)


def test_a_film(pair: Pair) -> None:
    frames = [picture(64, 48, seed) for seed in range(7)]
    data = film_file(frames, rate=1)
    chosen = [0, 2, 4]  # of seven
    made = prepared(pair, [frame for index, frame in enumerate(frames_of(data)) if index in chosen])
    tokenizer = AutoTokenizer.from_pretrained(pair.folder)
    expected = [1, 30]
    for number, (index, count) in enumerate(zip(chosen, made["num_soft_tokens_per_image"], strict=True)):
        stamp = f"{' ' if number else ''}00:0{index} "
        expected += [*tokenizer.encode(stamp, add_special_tokens=False), BOI, *[VIDEO] * count, EOI]
    expected += TEXT[:5]
    prompt = reader_of(pair.folder).read([1, 30, VIDEO, *TEXT[:5]], [part("video", data)])
    inputs = {"pixel_values": made["pixel_values"], "image_position_ids": made["image_position_ids"]}
    agree(pair, prompt, expected, **inputs)


def frames_of(data: bytes) -> list[Image.Image]:
    import io

    import av

    with av.open(io.BytesIO(data)) as container:
        return [frame.to_image() for frame in container.decode(video=0)]


@pytest.mark.parametrize("seconds", [0.3, 1.77])
def test_sound(hearing: Pair, seconds: float) -> None:
    data = sound_file(seconds)
    ids = [1, *TEXT[:5], AUDIO, *TEXT[5:8]]
    prompt = reader_of(hearing.folder).read(ids, [part("audio", data)])
    rows = prompt.ids.count(AUDIO)
    assert abs(rows - seconds / 0.04) <= 1.5, "a row is 40 ms"
    expected = [1, *TEXT[:5], BOA, *[AUDIO] * rows, EOA, *TEXT[5:8]]
    agree(hearing, prompt, expected, **listened(hearing, data))


def test_everything_at_once(hearing: Pair) -> None:
    image, sound = picture(40, 60), sound_file(0.4)
    made = prepared(hearing, [image])
    parts = [part("audio", sound), part("image", encoded(image))]
    prompt = reader_of(hearing.folder).read([1, AUDIO, 7, IMAGE, 8], parts)
    count, rows = made["num_soft_tokens_per_image"][0], prompt.ids.count(AUDIO)
    expected = [1, BOA, *[AUDIO] * rows, EOA, 7, BOI, *[IMAGE] * count, EOI, 8]
    inputs = {"pixel_values": made["pixel_values"], "image_position_ids": made["image_position_ids"]}
    agree(hearing, prompt, expected, **listened(hearing, sound), **inputs)


def test_pictures_see_themselves_whole_where_they_should(pair: Pair) -> None:
    prompt = reader_of(pair.folder).read([1, IMAGE], [part("image", encoded(picture()))])
    assert prompt.media.runs[0].whole is (pair.folder.name[:3] != "E4B")
    assert prompt.media.positions is None


@pytest.mark.parametrize(("unified", "whole"), [(True, True), (False, False)])
def test_what_a_config_means_that_does_not_say_it(unified: bool, whole: bool, tmp_path: Path) -> None:
    oracle = random_unified() if unified else random_media_gemma("31B")
    config = json.loads(oracle.config.to_json_string())["text_config"]
    del config["use_bidirectional_attention"]
    assert type(oracle.config.text_config)(**config).use_bidirectional_attention == ("vision" if whole else None)
    folder = save_media_gemma(tmp_path, oracle, text_config=config)
    prompt = reader_of(folder).read([1, IMAGE], [part("image", encoded(picture()))])
    assert prompt.media.runs[0].whole is whole


def test_drafts_change_nothing(pair: Pair, tmp_path: Path) -> None:
    reader = reader_of(pair.folder)
    prompts = [reader.read([*TEXT, IMAGE, 9], [part("image", encoded(picture(seed=seed)))]) for seed in range(2)]
    target = SimpleNamespace(config=pair.oracle.config.text_config)
    assistant = save_assistant(tmp_path, random_assistant(target))
    drafter = AssistantDrafter(load_assistant(assistant, pair.model, "n-1"), VOCAB)
    machine = engine(pair.model, beside=[drafter], context=512)
    check_drafts(machine, prompts, ["lookup", "assistant"])


def test_a_model_without_ears_says_so(tmp_path: Path) -> None:
    folder = save_media_gemma(tmp_path, random_media_gemma("31B"))
    with pytest.raises(ForerunError, match=r"a\.file: this model does not read audio, only text and image and video"):
        reader_of(folder).read([1, AUDIO], [part("audio", sound_file())])


def test_both_names_of_the_vision_embedder(tmp_path: Path) -> None:
    """As published, and as transformers saves it."""
    oracle, file = random_unified(), part("image", encoded(picture()))
    folders = [save_media_gemma(tmp_path / str(n), oracle, published=bool(n)) for n in range(2)]
    rows = [reader_of(folder).read([1, IMAGE], [file]).media.runs[0].embeddings for folder in folders]
    assert torch.equal(*rows)


@pytest.mark.parametrize(
    ("ids", "parts", "message"),
    [
        ([1, 2], 1, "0 placeholders for media and 1 files"),
        ([1, IMAGE, IMAGE], 1, "2 placeholders for media and 1 files"),
        ([1, VIDEO], 1, r"a\.file comes as image, and its place in the prompt is one for video"),
    ],
)
def test_every_part_has_its_place(hearing: Pair, ids: list[int], parts: int, message: str) -> None:
    files: list[MediaPart] = [part("image", encoded(picture()))] * parts
    with pytest.raises(ForerunError, match=message):
        reader_of(hearing.folder).read(ids, files)
