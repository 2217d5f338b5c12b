"""A head trained further: where it starts, what is refused, which drafts count, what is kept, when it ends."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model

import forerun
from forerun.cli.main import main
from forerun.errors import ForerunError
from forerun.progress import NullProgress
from forerun.train import loop
from forerun.train.average import WeightAverage
from forerun.train.generate import AnsweredPrompt
from forerun.train.head import Head, Scales
from forerun.train.loop import Trainer
from forerun.train.loss import Aim, Support, draft_loss, draw_support, teacher
from forerun.train.run import train_head
from forerun.train.settings import Settings
from forerun.train.store import FeatureStore
from forerun.train.target import load_target
from forerun.train.vocabulary import vocabulary_order
from forerun.weights.heads import read_head

SMALL = Settings(
    steps=4, prompts=16, answer_tokens=12, evaluation_tokens=8, batch_tokens=256, unroll=3, frequent=200, others=40
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=3)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("files")
    (folder / "prompts.txt").write_text("\n".join(f"tell me about {number}" for number in range(12)))
    (folder / "eval.jsonl").write_text(json.dumps({"prompt": "what is that?"}))
    return folder / "prompts.txt", folder / "eval.jsonl"


def train(model: Path, out: Path, settings: Settings, files: tuple[Path, Path], **more: Any) -> dict[str, Any]:
    return train_head(str(model), out, settings, device="cpu", prompts=[files[0]], evaluation=files[1], **more)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "head.safetensors")


@pytest.fixture(scope="module")
def first(model: Path, files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("first") / "head"
    train(model, out, replace(SMALL, draft_vocab=64, rate=4e-3), files)
    return out


def new_trainer(model: Path, settings: Settings = SMALL) -> Trainer:
    target = load_target(model, CPU)
    head = Head(target, (1,))
    head.start(Scales(2.0, 1.0), seed=0)
    chance = torch.Generator().manual_seed(3)

    def said(length: int) -> list[int]:
        return torch.randint(4, 290, (length,), generator=chance).tolist()

    answers = [AnsweredPrompt(said(3 + number % 4), said(6 + number % 5), 0.0, False) for number in range(10)]
    store = FeatureStore(target, (1,), answers)
    store.fill()
    return Trainer(head, store, store.mass, settings, lambda _: None)


def test_a_head_goes_on_from_another_ones_weights_and_keeps_its_vocabulary(
    model: Path, files: tuple[Path, Path], first: Path, tmp_path: Path
) -> None:
    still = replace(SMALL, start_from=str(first), rate=1e-12, weight_decay=0.0, seed=1)
    report = train(model, tmp_path / "same", still, files)
    before, after = weights_of(first), weights_of(tmp_path / "same")
    assert set(before) == set(after)
    for name, tensor in before.items():  # 8 bits are rounded to the same again; a scale to its last bit
        assert torch.equal(tensor, after[name]) or name.endswith(".scale")
        torch.testing.assert_close(after[name], tensor, rtol=3e-7, atol=0)
    assert report["draft_vocab"]["size"] == 64
    assert [run["training"]["steps"] for run in report["history"]] == [4]
    assert "An earlier run: Muon and AdamW, 0.004" in (tmp_path / "same" / "README.md").read_text()
    moved = train(model, tmp_path / "moved", replace(still, rate=4e-3, draft_vocab=32), files)
    assert len(weights_of(tmp_path / "moved")["mtp.draft_vocab"]) == 32
    assert moved["training"]["rate"] == 4e-3
    assert set(moved["draft_vocab"]["tokens_per_round"]) == {"32", "300", "as it started"}


def test_a_wider_head_is_trained_whole(model: Path, files: tuple[Path, Path], first: Path, tmp_path: Path) -> None:
    settings = replace(SMALL, start_from=str(first), intermediate=160, rate=4e-3)
    report = train(model, tmp_path / "wide", settings, files)
    assert report["head"]["intermediate"] == 160
    assert read_head(tmp_path / "wide").layer["intermediate_size"] == 160
    down = weights_of(tmp_path / "wide")["mtp.layers.0.mlp.down_proj.weight"]
    assert down.shape == (64, 160) and bool(down[:, 112:].any())
    answer = forerun.generate(forerun.load(str(model), head=tmp_path / "wide"), "hello", max_tokens=8, draft="mtp")
    assert answer.drafted > 0 and not answer.warnings


def test_a_trained_head_gets_a_lower_rate_unless_told_otherwise() -> None:
    assert Settings().peak == 3e-3
    assert Settings(start_from="x").peak < 1e-3
    assert Settings(start_from="x", rate=2e-3).peak == 2e-3


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--taps", "1"], "taps layers 1, 2, not 1"),
        (["--intermediate", "64"], "width is 112, which can grow but not shrink to 64"),
        (["--start-from", "nowhere"], "nowhere is not a folder"),
    ],
)
def test_a_head_that_does_not_fit_is_one_line(
    argv: list[str], word: str, model: Path, first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train-head", str(model), "--out", str(tmp_path / "head"), "--device", "cpu", "--steps", "1"]
    assert main([*command, "--start-from", str(first), *argv]) == 2
    assert word in capsys.readouterr().err.splitlines()[-1]


def test_a_head_of_another_shape_is_one_line(first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tiny_model(tmp_path / "other", "llama", num_hidden_layers=2)
    command = ["train-head", str(other), "--out", str(tmp_path / "head"), "--device", "cpu", "--steps", "1"]
    assert main([*command, "--start-from", str(first)]) == 2
    assert "3 layers" in capsys.readouterr().err.splitlines()[-1]


def test_tensors_of_another_shape_are_one_line(
    model: Path, first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import save_file

    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "config.json").write_text((first / "config.json").read_text())
    weights = weights_of(first)
    weights["mtp.fc.weight"] = weights["mtp.fc.weight"][:, :64].contiguous()
    save_file(weights, bad / "head.safetensors")
    command = ["train-head", str(model), "--out", str(tmp_path / "head"), "--device", "cpu", "--steps", "1"]
    assert main([*command, "--start-from", str(bad)]) == 2
    assert "mtp.fc.weight" in capsys.readouterr().err.splitlines()[-1]


def test_the_average_looks_back_over_a_share_of_the_steps() -> None:
    for steps in (100, 1000):
        weights = {"w": torch.zeros(1)}
        average = WeightAverage(weights, sharpness=12.0)
        for step in range(1, steps + 1):
            weights["w"] = torch.full((1,), step / steps)
            average.add(weights)
        # The mean of x under a weight of x^12 on [0, 1].
        assert float(average.values["w"]) == pytest.approx(13 / 14, abs=0.01)


def test_the_best_weights_are_kept(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "ENOUGH", 1)
    trainer = new_trainer(model)
    trainer.held = trainer.usable
    trainer.run(math.inf, tmp_path / "checkpoint.pt", NullProgress())
    rate = trainer.watch().rate
    trainer.keep_best()
    assert trainer.watch().rate >= rate and trainer.record.kept
    good = {name: tensor.detach().clone() for name, tensor in trainer.head.weights.items()}
    trainer.began_with = {name: torch.zeros_like(tensor) for name, tensor in good.items()}
    trainer.average.load(trainer.began_with, 4)
    trainer.keep_best()
    assert all(torch.equal(trainer.head.weights[name], tensor) for name, tensor in good.items())


def test_ctrl_c_leaves_a_checkpoint_to_go_on_from(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, checkpoint = Trainer._support, tmp_path / "checkpoint.pt"

    def pressed(trainer: Trainer, step: int) -> Support:  # in the middle of a step
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return usual(trainer, step)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "_support", pressed)
        new_trainer(model).run(math.inf, checkpoint, NullProgress())
    resumed, whole = new_trainer(model), new_trainer(model)
    resumed.load(checkpoint)
    assert resumed.record.steps == 2
    resumed.run(math.inf, checkpoint, NullProgress())
    whole.run(math.inf, tmp_path / "other.pt", NullProgress())
    assert resumed.record.steps == whole.record.steps == 4
    assert all(torch.equal(tensor, whole.head.weights[name]) for name, tensor in resumed.head.weights.items())


def test_a_draft_counts_when_those_before_it_from_the_same_base_are_right(model: Path) -> None:
    trainer = new_trainer(model)
    batch = trainer.store.batch(torch.arange(6).numpy(), 3)
    support = draw_support(trainer.output, torch.arange(300), torch.arange(0), 0, trainer.generator)
    outputs = trainer.head.unroll(batch.features, batch.following, 3)
    loss, found = trainer._drafted(batch, support, Aim(), missed=1.0)
    right: dict[tuple[int, int, int], bool] = {}  # (sequence, base, step)
    rows = list(zip(batch.sequence.tolist(), batch.position.tolist(), batch.depth.tolist(), strict=True))
    for row, (sequence, position, depth) in enumerate(rows):
        wanted = int((trainer.output @ batch.hidden[row]).argmax())
        for step in range(min(depth, 2) + 1):
            base = position - 1 - step
            mine = int((trainer.output @ outputs[step][sequence, base]).argmax())
            right[sequence, base, step] = mine == wanted and right.get((sequence, base, step - 1), step == 0)
    for step in range(3):
        reached = [value for (_, _, at), value in right.items() if at == step]
        assert float(found[step]) == pytest.approx(sum(reached) / len(reached), abs=1e-6)
    assert 0 < float(found[0]) < 1
    fewer, same = trainer._drafted(batch, support, Aim(), missed=0.0)
    assert bool(fewer < loss)
    assert [float(share) for share in same] == [float(share) for share in found]


def test_loss_and_gradient_equal_autograd_on_the_full_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    output, hidden = torch.randn(50, 8, generator=generator), torch.randn(6, 8, generator=generator)
    rows = torch.randn(6, 8, generator=generator, requires_grad=True)
    weights = torch.rand(6, generator=generator)
    support = draw_support(output, torch.arange(50), torch.arange(0), 0, generator)
    taught = teacher(hidden, (hidden @ output.T).logsumexp(-1), support, Aim())
    chances = taught.chances
    torch.testing.assert_close(chances, (hidden @ output.T).softmax(-1))
    loss, drafts = draft_loss(rows, support, taught, 0.0, weights)
    assert drafts.tolist() == (rows @ output.T).argmax(-1).tolist()
    (mine,) = torch.autograd.grad(loss, rows)
    each = -(chances * (rows @ output.T).log_softmax(-1)).sum(-1)
    (right,) = torch.autograd.grad((each * weights).sum(), rows)
    torch.testing.assert_close(loss, (each * weights).sum())
    torch.testing.assert_close(mine, right)


def test_sampled_ids_stand_for_the_ones_left_out() -> None:
    output = torch.zeros(100, 4)
    support = draw_support(output, torch.arange(10), torch.arange(10, 100), 9, torch.Generator().manual_seed(0))
    assert len(support.ids) == 19
    assert float(support.log_share.exp().sum()) == pytest.approx(100, rel=1e-5)


def test_a_hard_teacher_prefers_the_likeliest_id_where_it_is_sure() -> None:
    generator = torch.Generator().manual_seed(0)
    output, hidden = torch.randn(50, 8, generator=generator), torch.randn(6, 8, generator=generator)
    whole = (hidden @ output.T).logsumexp(-1)
    support = draw_support(output, torch.arange(50), torch.arange(0), 0, generator)
    soft, hard = (teacher(hidden, whole, support, Aim(share)) for share in (0.0, 0.4))
    only = torch.nn.functional.one_hot((hidden @ output.T).argmax(-1), 50)
    assert soft.top.tolist() == only.argmax(-1).tolist()
    torch.testing.assert_close(hard.chances, 0.6 * soft.chances + 0.4 * only)
    # The likeliest id may be among those that are not looked at: then nothing is made hard.
    best = int((hidden[0] @ output.T).argmax())
    others = torch.tensor([token for token in range(50) if token != best])
    part = draw_support(output, others, torch.tensor([best]), 1, generator)
    chances = teacher(hidden[:1], whole[:1], part, Aim(0.4)).chances
    torch.testing.assert_close(chances[0, -1], soft.chances[0, best])


def test_what_the_target_nearly_said_ranks_ids(model: Path) -> None:
    store = new_trainer(model).store
    hidden, _ = store.target.read(store.tokens[None, : store.lengths[0]])
    chances = store.target.logits(hidden[0, store.prompts[0] : store.lengths[0] - 1]).softmax(-1).sum(0)
    assert bool((store.mass + 1e-5 >= chances).all())
    assert float(store.mass.sum()) == pytest.approx(float((store.lengths - store.prompts - 1).sum()), rel=1e-4)


def test_kept_ids_come_first_in_the_order_of_ids() -> None:
    frequency = torch.tensor([5.0, 1.0, 9.0, 7.0, 3.0])
    assert vocabulary_order(frequency).tolist() == [2, 3, 0, 4, 1]
    assert vocabulary_order(frequency, torch.tensor([1, 4])).tolist() == [4, 1, 2, 3, 0]


def test_the_minutes_count_from_when_the_run_began(model: Path, files: tuple[Path, Path], tmp_path: Path) -> None:
    settings = replace(SMALL, steps=None, minutes=0.5)
    report = train(model, tmp_path / "head", settings, files, began=time.monotonic() - 40)
    assert report["training"]["steps"] >= 1 and report["training"]["seconds"] < 5
    assert (tmp_path / "head" / "config.json").is_file()


def test_a_run_that_never_began_is_in_nobodys_way(model: Path, files: tuple[Path, Path], tmp_path: Path) -> None:
    prompts, questions = files
    with pytest.raises(ForerunError, match="no file or folder"):
        train(model, tmp_path / "head", SMALL, (tmp_path / "mistyped.txt", questions))
    train(model, tmp_path / "head", SMALL, files)
    with pytest.raises(ForerunError, match="other settings or data"):
        train(model, tmp_path / "head", SMALL, (Path(shutil.copy(prompts, tmp_path)), questions))
