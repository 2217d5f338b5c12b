"""Damaged model folders: whatever stands in config.json or in a safetensors header, it loads or ends in one line."""

from __future__ import annotations

import copy
import json
import math
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model
from tiny_qwen import FAMILIES, tiny_of

from forerun.errors import ForerunError
from forerun.kernels.reference import ReferenceKernels
from forerun.models.families import build, read_config
from forerun.models.layers.rope import frequencies
from forerun.progress import NullProgress
from forerun.weights.checkpoint import open_checkpoint
from forerun.weights.config_reader import ConfigReader

ROPES = [
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "mscale": 1.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6, "attention_factor": 1.1},
]
STRANGE: list[Any] = [
    None, True, False, "", "x", "silu", [], [0], [None], ["full_attention"], ["linear_attention", 7], {},
    {"rope_type": 3}, {"a": {}}, 0, 1, -1, 2, 3, 7, 64, 2**16 + 1, 2**31, 2**63, 2**70, -(2**70), 10**400,
    0.0, 0.5, 1.0, 1.5, -0.0, -3.5,
    1e-320, 1e-30, 1e30, 1e308, math.nan, math.inf, -math.inf,
]  # fmt: skip
DAMAGES = 300  # of each kind


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_of(tmp_path_factory.mktemp(request.param), request.param)


def paths(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*here, key)
        yield from paths(inner, (*here, key))


def damage(config: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    """One to three places of a config hold something else, or nothing."""
    config = copy.deepcopy(config)
    inner = config.get("text_config", config)
    if dice.random() < 0.3:
        inner["rope_parameters"] = dict(dice.choice(ROPES))
    if dice.random() < 0.2:
        inner |= {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    for _ in range(dice.randint(1, 3)):
        *above, last = dice.choice(list(paths(config)))
        parent: Any = config
        for key in above:
            parent = parent[key]
        if dice.random() < 0.1:
            del parent[last]
        else:
            parent[last] = copy.deepcopy(dice.choice(STRANGE))
    return config


def described(config: dict[str, Any]) -> bool:
    """As `loads`, without a folder: a config that is understood, and its frequencies."""
    try:
        return all(frequencies(rope).isfinite().all() for rope in read_config(ConfigReader(config, "here")).ropes)
    except ForerunError as error:
        assert "\n" not in str(error) and len(str(error)) < 600
        return False


def loads(folder: Path) -> bool:
    """True when the folder loads, names and shapes checked; False when it is refused in one line."""
    try:
        checkpoint = open_checkpoint(folder)
        build(checkpoint, ReferenceKernels(), torch.device("meta"), torch.float32, NullProgress())
    except ForerunError as error:
        assert "\n" not in str(error) and len(str(error)) < 600
        return False
    return True


def test_damaged_configs(folder: Path, damages: int = DAMAGES) -> None:
    config, dice = json.loads((folder / "config.json").read_text()), random.Random(folder.name)
    refused = 0
    for number in range(damages):
        changed = damage(config, dice)
        if number % 4:
            refused += not described(changed)
        else:
            (folder / "config.json").write_text(json.dumps(changed))
            refused += not loads(folder)
    (folder / "config.json").write_text(json.dumps(config))
    assert loads(folder) and damages // 5 < refused < damages


@pytest.mark.parametrize("kind", ["header", "bytes", "length"])
def test_damaged_safetensors(folder: Path, tmp_path: Path, kind: str, damages: int = DAMAGES // 6) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file, dice = tmp_path / "model.safetensors", random.Random(folder.name + kind)
    whole = file.read_bytes()
    (size,) = struct.unpack("<Q", whole[:8])
    header, data = whole[8 : 8 + size], whole[8 + size :]
    for _ in range(damages):
        if kind == "header":
            text = json.dumps(damage(json.loads(header), dice)).encode()
            file.write_bytes(struct.pack("<Q", len(text)) + text + data)
        elif kind == "bytes":
            spoilt = bytearray(header)
            for _ in range(dice.randint(1, 4)):
                spoilt[dice.randrange(size)] = dice.randrange(256)
            file.write_bytes(whole[:8] + bytes(spoilt) + data)
        else:
            claimed = dice.choice([0, 1, size - 1, size + 1, len(whole), 2**31, 2**63, 2**64 - 1])
            file.write_bytes(struct.pack("<Q", claimed) + header + data[: dice.randrange(len(data))])
        loads(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2**70}, "num_hidden_layers must be a whole number from 1 to 4096, found a huge number"),
        ({"num_key_value_heads": [2]}, r"num_key_value_heads must be a whole number .*, found \[2\]"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a number .*, found nan"),
        ({"rope_theta": "x", "rope_parameters": None}, "rope_theta must be a number .*, found 'x'"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"rope_parameters\.factor must be a number .*, found None"),
        ({"rope_parameters": 7}, "rope_parameters must be an object, found 7"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, found 1"),
        ({"attention_bias": "no"}, "attention_bias must be true or false, found 'no'"),
        ({"hidden_act": ["silu"]}, r"hidden_act = \['silu'\] is not supported"),
        ({"head_dim": 15}, "cannot be rotated"),
        ({"num_key_value_heads": 3}, "cannot share 3"),
    ],
)
def test_the_key_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "llama")
    settings = json.loads((folder / "config.json").read_text()) | changes
    with pytest.raises(ForerunError, match=rf"^the file: {message}|^the file: .*{message}"):
        read_config(ConfigReader(settings, "the file"))
