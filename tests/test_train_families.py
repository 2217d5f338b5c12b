"""Every family a head can be trained for, beside the engine: features, answers, drafts; and those it is refused for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import VOCAB, decoder, request, run
from heads import drafts_of, mtp_engine, observe
from safetensors.torch import load_file, save_file
from tiny import tiny_model

from forerun.cli.main import main
from forerun.conversion import convert
from forerun.errors import ForerunError
from forerun.models.families import READERS, TRAINABLE
from forerun.train.evaluate import evaluate
from forerun.train.generate import write
from forerun.train.head import Head, Scales
from forerun.train.save import round_as_saved, save_head
from forerun.train.target import FrozenTarget, load_target

CPU = torch.device("cpu")
WINDOW, LONG = 9, 45  # a text several windows long
SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
UPPER = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama biases, tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama yarn rope": ("llama", {"rope_parameters": YARN}),
    "mistral no window": ("mistral", {}),
    "mistral window": ("mistral", {"sliding_window": WINDOW}),
    "mistral first has a window": ("mistral", {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL, FULL]}),
    "mistral others have a window": ("mistral", {"sliding_window": WINDOW, "layer_types": [FULL, SLIDING, SLIDING]}),
    "qwen2": ("qwen2", {}),
    "qwen2 upper windows": ("qwen2", UPPER),
    "qwen3": ("qwen3", {}),
    "qwen3 upper windows": ("qwen3", UPPER),
    "qwen3 mixed windows": ("qwen3", UPPER | {"layer_types": [SLIDING, FULL, SLIDING]}),
}


@dataclass
class Case:
    folder: Path
    target: FrozenTarget


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, settings = CASES[request.param]
    folder = tiny_model(tmp_path_factory.mktemp("model"), family, num_hidden_layers=3, **settings)
    return Case(folder, load_target(folder, CPU))


def text(length: int, seed: int = 1) -> list[int]:
    return torch.randint(4, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def random_start(target: FrozenTarget, taps: tuple[int, ...]) -> Head:
    """A head with the values that its file will have, none of them a round one."""
    head = Head(target, taps)
    head.start(Scales(2.0, 1.0), seed=0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in head.weights.values():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
    round_as_saved(head)
    return head


@torch.inference_mode()
def test_features_are_those_of_the_engine_and_of_transformers(case: Case) -> None:
    import transformers

    tokens = text(LONG)
    hidden, tapped = case.target.read(torch.tensor([tokens, text(LONG, 2)]), (0, 1, 2))
    found = torch.cat([*tapped, hidden], dim=-1)[0]
    features, logits = observe(decoder(case.folder, quantize=False), tokens, (0, 1, 2))
    torch.testing.assert_close(found, features, rtol=0, atol=1e-4)
    torch.testing.assert_close(case.target.logits(hidden[0]), logits, rtol=0, atol=1e-4)
    model = transformers.AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32)
    states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(found, torch.cat(states, dim=-1)[0], rtol=0, atol=1e-4)


@torch.inference_mode()
def test_a_step_sees_what_reading_the_whole_text_sees(case: Case) -> None:
    """Prompts shorter and longer than a window, each one token at a time from there on."""
    texts, lengths = [text(LONG), text(LONG, 2)], torch.tensor([5, 20])
    whole = case.target.logits(case.target.read(torch.tensor(texts))[0])
    cache = case.target.new_cache(2, 64)
    case.target.read(torch.tensor(texts)[:, :20], cache=cache)
    for positions in (lengths + step for step in range(25)):
        chosen = torch.tensor(texts)[torch.arange(2), positions]
        logits = case.target.step(chosen, positions, cache, 64)
        torch.testing.assert_close(logits, whole[torch.arange(2), positions], rtol=0, atol=1e-4)


def test_answers_are_those_of_the_engine(case: Case) -> None:
    prompts = [text(5), text(20, 2)]
    written = write(case.target, prompts, [0.0, 0.0], frozenset(), tokens=30, keep_loops=True)
    model = decoder(case.folder, quantize=False)
    for prompt, (said, _) in zip(prompts, written, strict=True):
        _, logits = observe(model, prompt + said, ())
        assert said == logits[len(prompt) - 1 : -1].argmax(-1).tolist() and len(said) == 30


@pytest.mark.parametrize("every", [1, 3])
def test_a_saved_head_drafts_in_the_engine_as_in_training(case: Case, every: int, tmp_path: Path) -> None:
    """With all ids, and with a draft vocabulary of every third."""
    head, ids = random_start(case.target, (1, 2)), torch.arange(0, VOCAB, every)
    save_head(tmp_path / "head", head, ids if every > 1 else None, {}, "")
    machine = mtp_engine(decoder(case.folder, quantize=False), tmp_path / "head")
    for length in (3, LONG):
        made = drafts_of(machine)
        run(machine, request(text(length), max_tokens=20, draft="mtp", draft_tokens=5))
        assert len(made[0][1]) == 5 and len(made) > 2
        for tokens, drafts in made:
            assert drafts == drafts_in_training(head, tokens, ids, len(drafts))


@torch.inference_mode()
def drafts_in_training(head: Head, tokens: list[int], ids: torch.Tensor, depth: int) -> list[int]:
    hidden, tapped = head.target.read(torch.tensor([tokens[:-1]]), head.taps)
    features = torch.stack([*tapped, hidden], dim=2)
    drafted: list[int] = []
    for step in range(depth):
        state = head.unroll(features, torch.tensor([[*tokens[1:], *drafted]]), step + 1)[step][0, -1]
        drafted.append(int(ids[head.target.logits(state)[ids].argmax()]))
    return drafted


def test_a_head_trained_beyond_the_windows_of_its_target_drafts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the command that trains to the command that generates, with mixed windows and texts longer than they are."""
    _, settings = CASES["mistral others have a window"]
    folder = tiny_model(tmp_path / "model", "mistral", num_hidden_layers=3, **settings)
    (tmp_path / "prompts.txt").write_text("\n".join(f"say something about {number}" for number in range(8)))
    (tmp_path / "eval.jsonl").write_text(json.dumps({"prompt": "what comes after that?"}))
    command = ["train-head", str(folder), "--out", str(tmp_path / "head"), "--device", "cpu", "--steps", "2"]
    command += ["--prompts", str(tmp_path / "prompts.txt"), "--evaluation", str(tmp_path / "eval.jsonl")]
    assert main([*command, "--answer-tokens", "16"]) == 0
    capsys.readouterr()
    command = ["generate", "-m", str(folder), "--head", str(tmp_path / "head"), "-p", "hello there, " * 8, "-n", "12"]
    assert main([*command, "--draft", "mtp", "--json"]) == 0
    told = capsys.readouterr()
    assert told.err == "" and json.loads(told.out)["drafted"] > 0


def test_figures_of_a_head_do_not_depend_on_the_order_of_its_taps(tmp_path: Path) -> None:
    """A head may list its taps in any order, which is the order of its inputs; figures took them by number."""
    target = load_target(tiny_model(tmp_path, "llama", num_hidden_layers=3), CPU)
    rising, falling = random_start(target, (1, 2)), Head(target, (2, 1))
    swapped = dict(rising.weights)
    for here, there in ((0, 1), (1, 0)):
        swapped[f"mtp.tap_norms.{here}.weight"] = rising.weights[f"mtp.tap_norms.{there}.weight"]
    first, second, last = rising.weights["mtp.fuse.weight"].chunk(3, dim=1)
    falling.load(swapped | {"mtp.fuse.weight": torch.cat((second, first, last), dim=1)})
    asked = [("a", text(8, seed)) for seed in range(6)]
    accepted = []
    for head in (rising, falling):
        found = evaluate(head, asked, frozenset(), torch.arange(300), [300], temperature=0.0, tokens=30, seed=0)
        accepted.append([one.accepted[300] for one in found])
    assert accepted[0] == accepted[1] and sum(map(sum, accepted[0])) > 0


def refused(folder: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that training for a model ends with, before anything is written."""
    capsys.readouterr()  # what was said while the model was made
    command = ["train-head", str(folder), "--out", str(out / "head"), "--device", "cpu", "--steps", "1"]
    assert main([*command, "--count", "2", "--answer-tokens", "4"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert not [file for file in out.rglob("*") if file.is_file()]
    return line


@pytest.mark.parametrize("family", sorted(set(READERS) - set(TRAINABLE)))
def test_families_without_trained_heads_are_refused(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_model(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": family}))
    line = refused(folder, tmp_path / "out", capsys)
    assert f"a head cannot be trained for model type {family!r} yet; only for llama, mistral, qwen2, qwen3" in line


def test_weights_that_a_config_does_not_describe_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Biases that config.json does not speak of were left out of the features; the engine refuses such a model."""
    folder = tiny_model(tmp_path / "model", "llama", attention_bias=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_bias": False}))
    with pytest.raises(ForerunError) as caught:
        decoder(folder, quantize=False)
    assert "tensors that a llama model does not have: model.layers.0.self_attn.k_proj.bias" in str(caught.value)
    assert str(caught.value) in refused(folder, tmp_path / "out", capsys)


def test_tensors_that_no_decoder_needs_are_in_nobodys_way(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "llama", tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_target(folder, CPU).output.shape == (300, 64)


@torch.inference_mode()
def test_a_model_in_8_bits_is_read_as_the_engine_reads_it(tmp_path: Path) -> None:
    """What `forerun convert --quantize int8` wrote was said to be in a format that is not read."""
    small = convert(str(tiny_model(tmp_path / "model", "llama")), tmp_path / "small", quantize="int8").folder
    tokens = text(LONG)
    hidden, tapped = load_target(small, CPU).read(torch.tensor([tokens]), (1,))
    features, _ = observe(decoder(small, quantize=False), tokens, (1,))
    torch.testing.assert_close(torch.cat([*tapped, hidden], dim=-1)[0], features, rtol=0, atol=1e-4)
