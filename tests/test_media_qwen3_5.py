"""Pictures and films in prompts of Qwen3.5: the same first logits as transformers, and drafts change nothing."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from engines import VOCAB, decoder, engine
from media_checks import TEXT, check_drafts, last_logits, reader_of
from media_files import encoded, film_file, part, picture, sound_file
from PIL import Image
from tiny_media import QWEN_IDS, random_media_qwen, save_media_qwen
from torch import Tensor
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

from forerun.draft.mtp import MtpDrafter
from forerun.errors import ForerunError
from forerun.media.parts import MediaPrompt
from forerun.models.layers.decoder import Decoder

IMAGE, VIDEO, START, END = QWEN_IDS.values()
HALF = [0.5, 0.5, 0.5]


@dataclass
class Pair:
    oracle: Any
    folder: Path
    model: Decoder


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "sparse"])
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    oracle = random_media_qwen(request.param)
    folder = save_media_qwen(tmp_path_factory.mktemp("qwen"), oracle)
    return Pair(oracle, folder, decoder(folder, quantize=False))


def processor(most: int = 32 * 32 * 24) -> Any:
    size = {"shortest_edge": 32 * 32 * 4, "longest_edge": most}
    return Qwen2VLImageProcessorPil(size=size, patch_size=16, image_mean=HALF, image_std=HALF)


@torch.inference_mode()
def agree(pair: Pair, prompt: MediaPrompt, ids: Sequence[int], **inputs: Any) -> None:
    assert prompt.ids == list(ids)
    tokens, kinds = torch.tensor([list(ids)]), torch.tensor([[{IMAGE: 1, VIDEO: 2}.get(token, 0) for token in ids]])
    expected = pair.oracle(input_ids=tokens, mm_token_type_ids=kinds, **inputs).logits[0, -1]
    expected[[IMAGE, VIDEO, START, END]] = float("-inf")  # the model does not write what stands for media
    torch.testing.assert_close(last_logits(pair.model, prompt), expected, atol=1e-4, rtol=0)
    grids = {name: grid for name, grid in inputs.items() if name.endswith("grid_thw")}
    positions, _ = pair.oracle.model.get_rope_index(tokens, kinds, **grids)
    ours = prompt.media.positions
    assert ours is not None
    assert torch.equal(ours - ours[0, 0], positions[:, 0]), "up to a constant"
    assert int(ours[:, -1].max()) == len(ids) - 1 or ids[-1] in (IMAGE, VIDEO), "what follows stands at its index"


@pytest.mark.parametrize("sizes", [[(120, 90)], [(500, 300), (33, 64), (10, 400)], [(8, 8)]], ids=str)
def test_pictures(pair: Pair, sizes: list[tuple[int, int]]) -> None:
    images = [picture(*size, seed=seed) for seed, size in enumerate(sizes)]
    made = processor()(images, return_tensors="pt")
    ids, expected = [1, *TEXT[:9]], [1, *TEXT[:9]]
    for grid in made["image_grid_thw"]:
        ids += [START, IMAGE, END, 20]
        expected += [START, *[IMAGE] * (int(grid.prod()) // 4), END, 20]
    prompt = reader_of(pair.folder).read(ids, [part("image", encoded(image)) for image in images])
    agree(pair, prompt, expected, pixel_values=made["pixel_values"], image_grid_thw=made["image_grid_thw"])


@pytest.mark.parametrize(
    ("frames", "rate", "size", "chosen", "fitted"),
    [
        (4, 1, (96, 64), [0, 1, 2, 3], (96, 64)),
        (9, 8, (160, 128), [0, 3, 5, 8], (128, 96)),  # four at least, and made smaller
        (5, 2, (96, 64), [0, 1, 2, 3, 4], (96, 64)),  # the last one twice
        (1, 2, (96, 64), [0], (96, 64)),
    ],
)
def test_films(
    pair: Pair, frames: int, rate: int, size: tuple[int, int], chosen: list[int], fitted: tuple[int, int]
) -> None:
    data = film_file([picture(*size, seed) for seed in range(frames)], rate=rate)
    with av.open(io.BytesIO(data)) as container:
        shown = [frame.to_image() for frame in container.decode(video=0)]
    kept = [shown[index].resize(fitted, Image.Resampling.BICUBIC) for index in chosen]
    times = [index / rate for index in chosen]
    if len(kept) % 2:
        kept, times = kept + kept[-1:], times + times[-1:]
    columns, rows = fitted[0] // 32, fitted[1] // 32
    tokenizer, expected = AutoTokenizer.from_pretrained(pair.folder), [1, 7, START]
    for first in range(0, len(kept), 2):
        stamp = f"<{(times[first] + times[first + 1]) / 2:.1f} seconds>"
        expected += [*tokenizer.encode(stamp, add_special_tokens=False), START, *[VIDEO] * (columns * rows), END]
    expected += [END, 8, 9]
    prompt = reader_of(pair.folder).read([1, 7, START, VIDEO, END, 8, 9], [part("video", data)])
    grid = torch.tensor([[len(kept) // 2, rows * 2, columns * 2]])
    agree(pair, prompt, expected, pixel_values_videos=pairs_of(kept), video_grid_thw=grid)


def pairs_of(frames: list[Image.Image]) -> Tensor:
    """Patches of two frames each, from those of the processor of pictures, where both are the same one."""
    each = [processor()([frame], return_tensors="pt", do_resize=False)["pixel_values"] for frame in frames]
    first, second = (torch.cat(each[start::2]).view(-1, 3, 2, 16, 16)[:, :, :1] for start in (0, 1))
    return torch.cat([first, second], dim=2).flatten(1)


def test_drafts_change_nothing(pair: Pair) -> None:
    reader = reader_of(pair.folder)
    ids = [*TEXT, START, IMAGE, END, 9]
    prompts = [reader.read(ids, [part("image", encoded(picture(100, 80, seed)))]) for seed in range(2)]
    head = pair.model.native_head()
    assert head is not None
    machine = engine(pair.model, beside=[MtpDrafter(head, VOCAB)], context=512)
    check_drafts(machine, prompts, ["lookup", "mtp"])


def test_what_the_model_cannot_read(pair: Pair) -> None:
    reader = reader_of(pair.folder)
    with pytest.raises(ForerunError, match=r"a\.file: this model does not read audio, only text and image and video"):
        reader.read([1, IMAGE], [part("audio", sound_file())])
    with pytest.raises(ForerunError, match=r"a\.file is more than 200 times as long as high"):
        reader.read([1, IMAGE], [part("image", encoded(picture(2001, 10)))])
