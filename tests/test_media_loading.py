"""Readers of media: who has one, when towers are read, what folders may say, and threads that read at once."""

from __future__ import annotations

import ast
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engines import NoText, finish
from hypothesis import given, settings
from hypothesis import strategies as st
from media_checks import TEXT, asked, reader_of
from media_files import encoded, part, picture, sound_file
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from tiny_gemma import tiny_gemma
from tiny_media import (
    GEMMA_IDS,
    QWEN_IDS,
    random_media_gemma,
    random_media_qwen,
    random_unified,
    save_media_gemma,
    save_media_qwen,
)
from tiny_qwen import tiny_qwen
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

import forerun
from forerun.conversion import convert
from forerun.errors import ForerunError
from forerun.language_model import LanguageModel
from forerun.media.expansion import Prepared, Stretch
from forerun.media.limits import MediaLimits
from forerun.media.parts import Kind, MediaPart
from forerun.media.pixels import colour_levels, size_within
from forerun.media.qwen3_5 import QwenVisionSettings, fitted
from forerun.media.reader import LocalMediaReader

SOURCE = Path(__file__).parent.parent / "src/forerun"
IMAGE, AUDIO = GEMMA_IDS["image_token_id"], GEMMA_IDS["audio_token_id"]
PICTURE = part("image", encoded(picture()))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_media_gemma(tmp_path_factory.mktemp("gemma"), random_media_gemma("E4B"))


@pytest.fixture(scope="module")
def model(gemma: Path) -> LanguageModel:
    return forerun.load(str(gemma), dtype="float32")


def without(folder: Path, copy: Path, *beginnings: str) -> Path:
    """A folder that lacks tensors."""
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(beginnings)}
    save_file(kept, copy / "model.safetensors", {"format": "pt"})
    return copy


def test_who_reads_what(model: LanguageModel, tmp_path: Path) -> None:
    assert model.media is not None and model.media.kinds == {"image", "video", "audio"}
    for folder in (tiny_model(tmp_path / "l", "llama"), tiny_gemma(tmp_path / "g", "31B", nested=True)):
        assert forerun.load(str(folder), dtype="float32").media is None
    text_alone = forerun.load(str(tiny_qwen(tmp_path / "q")), dtype="float32")
    assert text_alone.media is None
    seeing = forerun.load(str(save_media_qwen(tmp_path / "v", random_media_qwen(False))), dtype="float32")
    assert seeing.media is not None and seeing.media.kinds == {"image", "video"}


def test_a_model_whose_towers_were_cut_off_reads_text(gemma: Path, tmp_path: Path) -> None:
    deaf = without(gemma, tmp_path / "deaf", "model.audio_tower.", "model.embed_audio.")
    assert reader_of(deaf).kinds == {"image", "video"}
    blind = without(deaf, tmp_path / "blind", "model.vision_tower.", "model.embed_vision.")
    assert forerun.load(str(blind), dtype="float32").media is None


def test_towers_are_read_when_media_come(gemma: Path, tmp_path: Path) -> None:
    broken = without(gemma, tmp_path / "broken", "model.vision_tower.encoder.layers.1.mlp.")
    model = forerun.load(str(broken), dtype="float32")
    assert forerun.generate(model, "hello", raw=True, max_tokens=2).tokens
    assert model.media is not None
    with pytest.raises(ForerunError, match=r"tensor model\.vision_tower\.encoder\.layers\.1\.mlp\.\S+ is missing"):
        model.media.read([1, IMAGE], [PICTURE])


def test_names_without_a_prefix(gemma: Path, tmp_path: Path) -> None:
    """As in folders that were converted by other programs."""
    bare = without(gemma, tmp_path / "bare")
    tensors = load_file(bare / "model.safetensors")
    towers = ("model.vision_tower.", "model.embed_vision.")
    renamed = {n.removeprefix("model.") if n.startswith(towers) else n: t for n, t in tensors.items()}
    save_file(renamed, bare / "model.safetensors", {"format": "pt"})
    rows = [reader_of(folder).read([1, IMAGE], [PICTURE]).media.runs[0].embeddings for folder in (gemma, bare)]
    assert torch.equal(*rows)


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_a_converted_model_sees_the_same(gemma: Path, quantize: str, tmp_path: Path) -> None:
    done = convert(str(gemma), tmp_path / "converted", quantize=quantize)
    assert any("pictures" in note for note in done.notes)
    rows = [reader_of(folder).read([1, IMAGE], [PICTURE]).media.runs[0].embeddings for folder in (gemma, done.folder)]
    assert torch.equal(*rows)


def test_an_answer_by_way_of_the_loaded_model(model: LanguageModel) -> None:
    assert model.media is not None
    prompt = model.media.read([*TEXT, IMAGE, AUDIO], [PICTURE, part("audio", sound_file(0.2))])
    sequence = model.engine.submit(asked(prompt, draft="lookup", depth=3), NoText())
    finish(model.engine, [sequence])
    assert sequence.error is None and len(sequence.answer) == 16
    model.engine.release(sequence)


def test_threads_that_read_at_once_while_others_write(model: LanguageModel) -> None:
    """Each gets its own rows; answers in between are what they are without."""
    reader = model.media
    assert reader is not None
    files = [part("image", encoded(picture(seed=seed))) for seed in range(4)]
    alone = [reader.read([1, IMAGE], [file]).media.runs[0].embeddings for file in files]
    options: dict[str, Any] = {"raw": True, "max_tokens": 20, "draft": "lookup"}
    expected, found = forerun.generate(model, "hello", **options).tokens, {}

    def read(number: int) -> None:
        found[number] = reader.read([1, IMAGE], [files[number]]).media.runs[0].embeddings

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    assert forerun.generate(model, "hello", **options).tokens == expected
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[number], alone[number]) for number in range(4))


class Slow:
    """A family whose tower takes as long as a test wants."""

    kinds: Any = frozenset(("image",))

    def __init__(self) -> None:
        self.placeholders: Any = {7: "image"}
        self.began, self.may_end = threading.Event(), threading.Event()

    def prepare(self, part: MediaPart, limits: MediaLimits) -> Prepared:
        return Prepared("image", [7, 7], [Stretch(0, 2)], None)

    def load(self, kind: Kind) -> None:
        pass

    def encode(self, prepared: Prepared) -> torch.Tensor:
        self.began.set()
        assert self.may_end.wait(30)
        return torch.zeros(2, 4)

    def whole(self, kind: Kind) -> bool:
        return False

    def positions(self, tokens: int, stretches: Any) -> None:
        return None


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_a_slow_tower_holds_up_nobody_on_a_cpu(device: str) -> None:
    """Elsewhere nobody is inside the engine meanwhile."""
    owner, slow, found = threading.Lock(), Slow(), []
    reader = LocalMediaReader(slow, owner, torch.device(device), MediaLimits())  # type: ignore[arg-type]
    thread = threading.Thread(target=lambda: found.append(reader.read([1, 7, 2], [PICTURE]).ids))
    thread.start()
    assert slow.began.wait(30)
    assert owner.locked() is (device != "cpu")
    slow.may_end.set()
    thread.join()
    assert found == [[1, 7, 7, 2]] and not owner.locked()


def test_no_tower_is_loaded_while_another_runs() -> None:
    """transformers sets the number format of new tensors for the whole process while it builds one."""
    owner, slow, loaded = threading.Lock(), Slow(), list[str]()
    slow.placeholders, slow.kinds = {7: "image", 8: "audio"}, frozenset(("image", "audio"))
    slow.prepare = lambda part, _: Prepared(part.kind, [7, 7], [Stretch(0, 2)], None)  # type: ignore[method-assign]
    slow.load = loaded.append  # type: ignore[method-assign, assignment]
    reader = LocalMediaReader(slow, owner, torch.device("cpu"), MediaLimits())  # type: ignore[arg-type]
    seeing = threading.Thread(target=reader.read, args=([7], [PICTURE]))
    seeing.start()
    assert slow.began.wait(30) and loaded == ["image"]
    hearing = threading.Thread(target=reader.read, args=([8], [part("audio", b"")]))
    hearing.start()
    hearing.join(0.2)
    assert hearing.is_alive() and loaded == ["image"] and not owner.locked(), "it waits, and not inside the engine"
    slow.may_end.set()
    for thread in (seeing, hearing):
        thread.join()
    assert loaded == ["image", "audio"]


def settings_of(folder: Path, copy: Path, name: str, values: Any) -> Path:
    without(folder, copy)
    (copy / "processor_config.json").unlink()
    if values is not None:
        (copy / name).write_text(json.dumps(values))
    return copy


@pytest.mark.parametrize(
    ("file", "values", "rows"),
    [
        ("processor_config.json", {"image_processor": {"max_soft_tokens": 140}}, 140),
        ("preprocessor_config.json", {"max_soft_tokens": 140}, 140),
        ("none", None, 280),
    ],
)
def test_settings_in_files_new_and_old(gemma: Path, file: str, values: Any, rows: int, tmp_path: Path) -> None:
    folder = settings_of(gemma, tmp_path / "copy", file, values)
    prompt = reader_of(folder).read([1, IMAGE], [part("image", encoded(picture(100, 100)))])
    assert rows * 0.8 < len(prompt.media.runs[0].embeddings) <= rows


def test_settings_as_transformers_saves_them(gemma: Path, tmp_path: Path) -> None:
    """Every field that its processors have, whether it matters or not."""
    saved = {
        "image_processor": transformers.Gemma4ImageProcessorPil(max_soft_tokens=70),
        "feature_extractor": transformers.Gemma4AudioFeatureExtractor(),
    }
    values = {name: json.loads(each.to_json_string()) for name, each in saved.items()}
    folder = settings_of(gemma, tmp_path / "gemma", "processor_config.json", values)
    parts = [PICTURE, part("audio", sound_file(0.3))]
    prompts = [reader_of(each).read([1, IMAGE, AUDIO], parts) for each in (gemma, folder)]
    for ours, theirs in zip(*(prompt.media.runs for prompt in prompts), strict=True):
        assert torch.equal(ours.embeddings, theirs.embeddings)
    qwen = save_media_qwen(tmp_path / "qwen", random_media_qwen(False))
    settings = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    size = {"shortest_edge": 4096, "longest_edge": 24 * 1024}
    image = json.loads(transformers.Qwen2VLImageProcessorPil(size=size, **settings).to_json_string())
    other = settings_of(qwen, tmp_path / "copy", "preprocessor_config.json", image)
    ids = [1, QWEN_IDS["image_token_id"]]
    rows = [reader_of(each).read(ids, [PICTURE]).media.runs[0].embeddings for each in (qwen, other)]
    assert torch.equal(*rows)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_soft_tokens": 71}, "max_soft_tokens must be 70, 140, 280, 560 or 1120"),
        ({"patch_size": 14}, "patch_size = 14 is not supported"),
        ({"do_resize": False}, "do_resize = False is not supported"),
        ({"image_std": [0.0, 1.0, 1.0], "do_normalize": True}, "image_std must be a list of three numbers above 0"),
        ({"image_mean": "red"}, "image_mean must be a list of three numbers"),
    ],
)
def test_settings_that_are_not_what_they_should_be(gemma: Path, values: Any, message: str, tmp_path: Path) -> None:
    folder = settings_of(gemma, tmp_path / "copy", "processor_config.json", {"image_processor": values})
    with pytest.raises(ForerunError, match=message):
        reader_of(folder).read([1, IMAGE], [PICTURE])


@pytest.mark.parametrize("config", [{"depth": 10**6}, {"hidden_size": -5}, {"num_heads": 0}])
def test_a_tower_that_cannot_be(config: Any, tmp_path: Path) -> None:
    folder = save_media_qwen(tmp_path, random_media_qwen(False))
    values = json.loads((folder / "config.json").read_text())
    values["vision_config"] |= config
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ForerunError, match="vision_config"):
        reader_of(folder).read([1, QWEN_IDS["image_token_id"]], [PICTURE])


@pytest.mark.parametrize(
    ("limits", "count", "message"),
    [
        ({"items": 2}, 3, "3 files came with the prompt, and at most 2 are read"),
        ({"soft_tokens": 130}, 3, r"third: the media of the prompt take more than 130 tokens"),
    ],
)
def test_limits_of_a_prompt(gemma: Path, limits: dict[str, int], count: int, message: str) -> None:
    parts = [MediaPart("image", PICTURE.data, name) for name in ("first", "second", "third")]
    with pytest.raises(ForerunError, match=message):
        reader_of(gemma, **limits).read([1, *[IMAGE] * count], parts)


def test_no_tower_is_read_for_a_prompt_that_media_make_too_long(gemma: Path) -> None:
    fits = reader_of(gemma).read([*TEXT, IMAGE, IMAGE], [PICTURE] * 2).ids
    model = forerun.load(str(gemma), dtype="float32", max_context=len(fits))
    assert model.media is not None
    with pytest.raises(ForerunError, match=f"at least {len(fits)} tokens with its media and the context holds"):
        forerun.generate(model, [*TEXT, IMAGE, IMAGE], images=[encoded(picture())] * 2, max_tokens=1)
    assert not model.media._family._towers._loaded  # type: ignore[attr-defined]
    assert forerun.generate(model, [*TEXT[1:], IMAGE, IMAGE], images=[encoded(picture())] * 2, max_tokens=1).tokens


def test_rows_are_of_the_decoders_size(tmp_path: Path) -> None:
    folder = save_media_gemma(tmp_path, random_unified())
    prompt = reader_of(folder).read([1, IMAGE], [PICTURE])
    assert prompt.media.runs[0].embeddings.shape[1] == 48
    assert [run.stop - run.start for run in prompt.media.runs] == [prompt.ids.count(IMAGE)]


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([70, 140, 280, 1120]))
def test_sizes_of_gemma_are_those_of_transformers(height: int, width: int, most: int) -> None:
    assert size_within(height, width, 48, most) == get_aspect_ratio_preserving_size(height, width, 16, most * 9, 3)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 1 << 17), st.integers(1 << 17, 1 << 22))
def test_sizes_of_qwen_are_those_of_transformers(height: int, width: int, least: int, most: int) -> None:
    class Sized:
        size = (width, height)

    Sized.height, Sized.width = height, width  # type: ignore[attr-defined]
    vision = QwenVisionSettings(least, most, colour_levels(1 / 255, [0.5] * 3, [0.5] * 3))
    try:
        expected: Any = smart_resize(height, width, 32, least, most)
    except ValueError:
        expected = None
    if expected is None:
        with pytest.raises(ForerunError, match="200 times"):
            fitted(PICTURE, Sized, 1, 1, 32, vision)  # type: ignore[arg-type]
    else:
        assert fitted(PICTURE, Sized, 1, 1, 32, vision) == expected  # type: ignore[arg-type]


def test_decoders_are_imported_where_they_are_used() -> None:
    """Machines that only ever see text may lack them."""
    for file in SOURCE.rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"PIL", "av", "torchvision"}, file
