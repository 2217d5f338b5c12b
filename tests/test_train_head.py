"""Training a head on a tiny model: it learns, resumes exactly, and its files and figures are what they claim to be."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_model

from forerun.cli.main import main
from forerun.errors import ForerunError
from forerun.train.chain import fused_works
from forerun.train.evaluate import Measured, choose_vocabulary, evaluate, tokens_per_round
from forerun.train.generate import AnsweredPrompt, write
from forerun.train.head import Head, Scales
from forerun.train.run import train_head
from forerun.train.settings import Settings, default_taps
from forerun.train.start import load_start
from forerun.train.store import FeatureStore
from forerun.train.target import FrozenTarget, load_target, rotate

SMALL = Settings(
    steps=24,
    prompts=48,
    answer_tokens=20,
    evaluation_tokens=16,
    batch_tokens=512,
    unroll=3,
    frequent=200,
    others=40,
    rate=2e-2,
    hard=0.0,  # so that losses of training and of held-out answers mean the same
    missed=1.0,
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=3)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("\n".join(f"say something about {number}" for number in range(24)))
    return file


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("questions") / "eval.jsonl"
    entries = [{"category": "ab"[number % 2], "prompt": f"what comes after {number}?"} for number in range(4)]
    file.write_text("\n".join(json.dumps(entry) for entry in entries))
    return file


def train(model: Path, out: Path, settings: Settings, prompts: Path, questions: Path, **more: Any) -> dict[str, Any]:
    return train_head(str(model), out, settings, device="cpu", prompts=[prompts], evaluation=questions, **more)


@pytest.fixture(scope="module")
def trained(
    model: Path, prompts: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("trained") / "head"
    return out, train(model, out, SMALL, prompts, questions)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "head.safetensors")


def saved_head(target: FrozenTarget, folder: Path) -> Head:
    head = Head(target, default_taps(3))
    start = load_start(target, Settings(start_from=str(folder)), lambda _: None)
    assert start is not None
    start.put_into(head, seed=0)
    return head


def started(target: FrozenTarget, taps: tuple[int, ...], noise: float = 0.0) -> Head:
    head = Head(target, taps)
    head.start(Scales(2.0, 1.0), seed=0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in head.weights.values():
            weight += noise * torch.randn(weight.shape, generator=generator)
    return head


def test_training_lowers_the_loss_and_raises_acceptance(model: Path, trained: tuple[Path, dict[str, Any]]) -> None:
    _, report = trained
    target = load_target(model, CPU)
    losses = report["training"]["losses"]
    assert report["training"]["steps"] == 24
    assert report["training"]["held_out"][-1][1] < losses[0][1] - 0.15
    untrained = started(target, default_taps(3))
    order = torch.arange(300)
    ids = [("a", list(range(10 + shift, 40 + shift))) for shift in range(8)]
    after = saved_head(target, trained[0])
    rates = []
    for head in (untrained, after):
        found = [
            one
            for seed in range(1, 5)
            for one in evaluate(head, ids, frozenset(), order, [300], temperature=0.8, tokens=40, seed=seed)
        ]
        rates.append(tokens_per_round([one.accepted[300] for one in found], 4))
    assert rates[1] > rates[0] + 0.03


def test_saved_head_has_the_names_and_shapes_of_the_format(trained: tuple[Path, dict[str, Any]]) -> None:
    out, report = trained
    weights = weights_of(out)
    config = json.loads((out / "config.json").read_text())
    assert config["format"] == "forerun-mtp-head" and config["version"] == 2
    assert config["target"]["hidden_size"] == 64 and config["target"]["num_hidden_layers"] == 3
    assert config["taps"] == [1, 2] and config["layer"]["intermediate_size"] == 112
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    small = {name for name in shapes if name.endswith("_proj.weight")}
    assert {name: shapes.pop(name + ".scale") for name in small} == {name: shapes[name][:1] for name in small}
    layer = "mtp.layers.0."
    assert shapes == {
        "mtp.fc.weight": (64, 128),
        "mtp.pre_fc_norm_embedding.weight": (64,),
        "mtp.pre_fc_norm_hidden.weight": (64,),
        "mtp.norm.weight": (64,),
        "mtp.fuse.weight": (64, 192),
        "mtp.tap_norms.0.weight": (64,),
        "mtp.tap_norms.1.weight": (64,),
        "mtp.tap_norms.2.weight": (64,),
        f"{layer}input_layernorm.weight": (64,),
        f"{layer}post_attention_layernorm.weight": (64,),
        f"{layer}self_attn.q_proj.weight": (64, 64),
        f"{layer}self_attn.k_proj.weight": (32, 64),
        f"{layer}self_attn.v_proj.weight": (32, 64),
        f"{layer}self_attn.o_proj.weight": (64, 64),
        f"{layer}mlp.gate_proj.weight": (112, 64),
        f"{layer}mlp.up_proj.weight": (112, 64),
        f"{layer}mlp.down_proj.weight": (64, 112),
    }
    assert {weights[name].dtype for name in shapes.keys() - small} == {torch.bfloat16}
    assert json.loads((out / "evaluation.json").read_text())["evaluation"] == report["evaluation"]
    assert report["evaluation"]["given"]["greedy"]["all"]["answers"] == 4
    assert "Tokens per round" in (out / "README.md").read_text()
    assert len({file.stat().st_mode & 0o777 for file in out.iterdir()}) == 1


def test_a_resumed_run_equals_an_uninterrupted_one(
    model: Path, prompts: Path, questions: Path, trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    train(model, tmp_path / "head", SMALL, prompts, questions, stop_after=11)
    halfway = weights_of(tmp_path / "head")
    report = train(model, tmp_path / "head", SMALL, prompts, questions)
    resumed, whole = weights_of(tmp_path / "head"), weights_of(trained[0])
    assert report["training"]["steps"] == 24
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert not torch.equal(halfway["mtp.fc.weight"], whole["mtp.fc.weight"])
    with pytest.raises(ForerunError, match="other settings"):
        train(model, tmp_path / "head", replace(SMALL, rate=2e-3), prompts, questions)
    for given in ((questions, questions), (prompts, prompts.with_suffix(".jsonl"))):  # its answers fit no other data
        prompts.with_suffix(".jsonl").write_text('{"prompt": "say something about 3"}')
        with pytest.raises(ForerunError, match="or data"):
            train(model, tmp_path / "head", SMALL, *given)


def test_a_draft_vocabulary_is_sorted_and_of_the_size_asked_for(
    model: Path, prompts: Path, questions: Path, tmp_path: Path
) -> None:
    report = train(model, tmp_path / "head", replace(SMALL, steps=2, draft_vocab=64), prompts, questions)
    ids = weights_of(tmp_path / "head")["mtp.draft_vocab"]
    assert ids.dtype == torch.int64 and len(ids) == 64 and bool((ids.diff() > 0).all())
    assert report["draft_vocab"]["size"] == 64


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_unrolled_steps_equal_drafting_one_slot_after_another(family: str, tmp_path: Path) -> None:
    """The head's formulas written out for one base position, with no tricks, against the batched unrolling."""
    target = load_target(tiny_model(tmp_path / "m", family, num_hidden_layers=3), CPU)
    head = started(target, (1, 2), noise=0.05)
    tokens = torch.randint(4, 290, (2, 24), generator=torch.Generator().manual_seed(2))
    hidden, tapped = target.read(tokens[:, :20], (1, 2))
    features = torch.stack([*tapped, hidden], dim=2)
    outputs = head.unroll(features, tokens[:, 1:23], 3)
    later = head.unroll(features, tokens[:, 1:23], 3, first=7)
    for whole, part in zip(outputs, later, strict=True):
        torch.testing.assert_close(part, whole[:, 7:], rtol=1e-4, atol=1e-4)
    for row, base in ((0, 9), (1, 17)):
        slow = draft_slots(head, features[row, : base + 1], tokens[row, 1 : base + 4], 3)
        for step in range(3):
            torch.testing.assert_close(outputs[step][row, base], slow[step], rtol=1e-4, atol=1e-4)


def draft_slots(head: Head, features: torch.Tensor, following: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Slots 0 … base + steps - 1 of one sequence, the last `steps - 1` continuing from the head's own outputs."""
    w, config = head.weights, head.config
    base = len(features) - 1

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], w[name], config.eps)

    fused = torch.cat([norm(features[:, part], f"mtp.tap_norms.{part}.weight") for part in range(3)], dim=-1)
    states = list(fused @ w["mtp.fuse.weight"].T)
    found: list[torch.Tensor] = []
    for step in range(steps):
        length = base + 1 + step
        left = norm(head.target.embedding[following[:length]], "mtp.pre_fc_norm_embedding.weight")
        right = norm(torch.stack(states), "mtp.pre_fc_norm_hidden.weight")
        x = torch.cat((left, right), dim=-1) @ w["mtp.fc.weight"].T
        normed = norm(x, "mtp.layers.0.input_layernorm.weight")
        heads = []
        for part in "qkv":
            name = f"mtp.layers.0.self_attn.{part}_proj."
            flat = F.linear(normed, w[name + "weight"], w.get(name + "bias"))
            split = flat.view(length, -1, config.layout.size).transpose(0, 1)
            if part != "v":
                if head.target.attention.head_norms:
                    split = norm(split, f"mtp.layers.0.self_attn.{part}_norm.weight")
                split = rotate(split, *head.target.rope.at(torch.arange(length), length))
            heads.append(split)
        query, key, value = heads
        shared = config.layout.heads // config.layout.kv_heads
        key, value = key.repeat_interleave(shared, 0), value.repeat_interleave(shared, 0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(0, 1).flatten(1)
        x = x + mixed @ w["mtp.layers.0.self_attn.o_proj.weight"].T
        normed = norm(x, "mtp.layers.0.post_attention_layernorm.weight")
        gate, up = (normed @ w[f"mtp.layers.0.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        out = norm(x + (F.silu(gate) * up) @ w["mtp.layers.0.mlp.down_proj.weight"].T, "mtp.norm.weight")
        found.append(out[-1])
        states.append(out[-1])
    return found


def test_measured_acceptance_equals_drafting_by_hand(model: Path, trained: tuple[Path, dict[str, Any]]) -> None:
    target = load_target(model, CPU)
    head = saved_head(target, trained[0])
    prompts = [("a", list(range(30 + 40 * shift, 38 + 40 * shift + shift))) for shift in range(3)]
    answers = write(target, [ids for _, ids in prompts], [0.0] * 3, frozenset(), tokens=24, keep_loops=True)
    measured = evaluate(head, prompts, frozenset(), torch.arange(300), [300], temperature=0.0, tokens=24, seed=0)
    total = 0
    for (_, ids), (said, _), found in zip(prompts, answers, measured, strict=True):
        assert found.accepted[300] == [accepted_by_hand(head, ids, said, base) for base in range(len(said) - 1)]
        total += sum(found.accepted[300])
    assert total > 0


def accepted_by_hand(head: Head, prompt: list[int], said: list[int], base: int) -> int:
    """Draft after the answer's token `base` one token at a time, and count until the first wrong one."""
    known = prompt + said[: base + 1]
    hidden, tapped = head.target.read(torch.tensor([known[:-1]]), head.taps)
    features = torch.stack([*tapped, hidden], dim=2)[0]
    drafted: list[int] = []
    for step in range(6):
        following = torch.tensor([*known[1:], *drafted])
        state = draft_slots(head, features, following, step + 1)[-1]
        drafted.append(int((head.target.output @ state).argmax()))
        if base + step + 1 >= len(said) or drafted[-1] != said[base + step + 1]:
            return step
    return 6


def test_the_fused_attention_and_its_gradients_equal_the_plain_ones() -> None:
    assert fused_works(4, 16, CPU, torch.float32) == ""


def test_batches_hold_the_positions_that_a_draft_can_reach(model: Path) -> None:
    target = load_target(model, CPU)
    answers = [AnsweredPrompt([5, 6, 7], [8, 9, 10, 11], 0.0, False), AnsweredPrompt([5, 6], [12, 13, 2], 0.0, False)]
    store = FeatureStore(target, (1,), answers)
    store.fill()
    batch = store.batch(store.epoch(torch.tensor([0, 1]).numpy(), 1000, 0)[0], 3)
    row = int((batch.following[:, 0] == 6).nonzero()[0, 0]) if len(batch.following) else 0
    long = next(index for index in range(2) if batch.following[index, 2] == 8)
    mine = batch.sequence == long
    # Of "5 6 7 8 9 10 11" the positions of 8, 9 and 10 are drafted after; 8 is reached by a first draft only.
    assert batch.position[mine].tolist() == [3, 4, 5] and batch.depth[mine].tolist() == [0, 1, 2]
    assert batch.following[long].tolist()[:6] == [6, 7, 8, 9, 10, 11] and row in (0, 1)
    hidden, _ = target.read(torch.tensor([[5, 6, 7, 8, 9, 10, 11]]))
    torch.testing.assert_close(batch.hidden[mine], hidden[0, 3:6], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(batch.whole[mine], target.logits(hidden[0, 3:6]).logsumexp(-1), rtol=1e-4, atol=1e-4)


def test_rounds_are_counted_as_the_engine_runs_them() -> None:
    # Bases accept 2, then (three further) 0, then 5 of which only what is left of the answer counts.
    assert tokens_per_round([[2, 9, 9, 0, 5, 0]], 4) == pytest.approx((3 + 1 + 2) / 3)
    assert tokens_per_round([[2, 9, 9, 0, 5, 0]], 1) == pytest.approx((2 + 2 + 2) / 3)
    assert tokens_per_round([], 4) == 0


def test_the_smallest_vocabulary_that_costs_little_is_chosen() -> None:
    good, poor = [4, 0, 0, 0, 0] * 20, [0] * 100
    measured = [Measured("a", False, {10: poor, 20: good, 100: good}, 101)]
    assert choose_vocabulary(measured, 100, [10, 20])[0] == 20
    assert choose_vocabulary(measured, 100, [10])[0] == 100


def test_answers_of_a_batch_equal_those_of_the_model_alone(model: Path) -> None:
    import transformers

    target = load_target(model, CPU)
    alone = transformers.AutoModelForCausalLM.from_pretrained(model).float().eval()
    prompts = [[5, 9, 200], list(range(20, 57))]
    written = write(target, prompts, [0.0, 0.0], frozenset({2}), tokens=40)
    for prompt, (said, _) in zip(prompts, written, strict=True):
        ids = torch.tensor([prompt])
        right = alone.generate(ids, max_new_tokens=40, do_sample=False, attention_mask=torch.ones_like(ids))
        assert said == right[0, len(prompt) :].tolist()[: len(said)] and len(said) > 10


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_training_goes_on_without_room_for_checkpoints(
    model: Path, prompts: Path, questions: Path, tmp_path: Path
) -> None:
    """It ended in torch's words about positions in a file, and all of its minutes were lost."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work/checkpoint.part").symlink_to("/dev/full")
    lines: list[str] = []
    settings = replace(SMALL, steps=2)
    train(model, tmp_path / "head", settings, prompts, questions, work=tmp_path / "work", log=lines.append)
    assert any("no checkpoint could be written" in line and "No space left" in line for line in lines)
    assert weights_of(tmp_path / "head")


def test_the_command_reads_several_files_and_says_how_wide_they_are(
    model: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"prompt": f"Why is {n} odd?"}) for n in range(8)))
    talk = [
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello!"},
        {"from": "human", "value": "Translate it."},
    ]
    asked = [{"conversations": talk}, {"instruction": "WHY is 3 odd"}, {"prompt": "what comes after 2?"}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, asked)))
    command = ["train-head", str(model), "--out", str(tmp_path / "head"), "--device", "cpu", "--steps", "1"]
    command += ["--prompts", str(tmp_path / "a.jsonl"), "--prompts", str(tmp_path / "b.jsonl"), "--answer-tokens", "12"]
    assert main([*command, "--evaluation", str(questions)]) == 0
    told = capsys.readouterr()
    assert "9 prompts: question 89%, translation 11%; 1 with several turns" in told.err
    assert "left out: 1 that repeat another one, 1 that share eight words" in told.err
    assert told.err.index("9 prompts:") < told.err.index("answers kept")
    assert "### Given: greedy" in told.out


def test_a_model_without_a_template_is_asked_what_it_can_be_asked(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A conversation, or more than fits, is left out before the training, instead of ending the run after it."""
    base = tmp_path / "base"
    shutil.copytree(model, base)
    (base / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    talk = [{"role": role, "content": "Hi"} for role in ("user", "assistant", "user")]
    asked = [{"messages": talk}, {"prompt": "word " * 900}, {"prompt": "what comes after 2?"}]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, asked)))
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"prompt": f"Why is {n} odd?"}) for n in range(8)))
    command = ["train-head", str(base), "--out", str(tmp_path / "head"), "--device", "cpu", "--steps", "1"]
    command += ["--prompts", str(tmp_path / "p.jsonl"), "--answer-tokens", "12"]
    assert main([*command, "--evaluation", str(tmp_path / "questions.jsonl")]) == 0
    told = capsys.readouterr()
    assert "2 of 3 evaluation prompts left out" in told.err and "| all | 1 |" in told.out
    assert (tmp_path / "head" / "head.safetensors").is_file()
    (tmp_path / "questions.jsonl").write_text(json.dumps(asked[0]))
    assert main([*command, "--evaluation", str(tmp_path / "questions.jsonl")]) != 0
    assert "can be asked no evaluation prompt" in capsys.readouterr().err.splitlines()[-1]
