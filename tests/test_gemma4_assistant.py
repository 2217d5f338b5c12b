"""The assistant of Gemma 4: its numbers against transformers', what fits a target, and drafts that change nothing."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import VOCAB, NoText, decoder, engine, finish, request, run
from rules import ByRule, random_rule
from storm import Storm, random_visit
from test_models import load
from test_models import run as feed
from tiny_gemma import FULL, SLIDING, VARIANTS, WINDOW, random_assistant, random_gemma, save_assistant, save_gemma

from forerun.bench.random_model import ASSISTANTS, SHAPES
from forerun.cache.pages import PagePool, SequenceCache
from forerun.draft.assistant import AssistantDrafter
from forerun.engine.engine import Engine
from forerun.errors import ForerunError
from forerun.kernels.cpu import CpuKernels
from forerun.kernels.interface import PassRows
from forerun.kernels.reference import ReferenceKernels
from forerun.models.families import read_config
from forerun.models.gemma4_assistant import build_assistant, fitting_layers, read_assistant
from forerun.models.layers.config import AttentionConfig
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.rows import Part, Pass, rows_of
from forerun.weights.checkpoint import open_checkpoint
from forerun.weights.config import read_config as read_json
from forerun.weights.config_reader import ConfigReader

CPU = torch.device("cpu")
KERNELS = {"cpu": lambda: CpuKernels(quantize=False), "reference": ReferenceKernels}
TOKENS = torch.randint(0, 290, (2, 45), generator=torch.Generator().manual_seed(1)).tolist()
DEPTH = 3


def attach(folder: Path, target: Decoder, position: str = "n-1") -> Any:
    checkpoint = open_checkpoint(folder)
    return build_assistant(read_assistant(checkpoint.reader), checkpoint, target, position)


@torch.inference_mode()
def expected_steps(target: Any, assistant: Any, tokens: list[int], position: int) -> list[tuple[Any, Any]]:
    """Logits and projected states of transformers, drafting after `tokens`, of which the last is pending."""
    output = target.model(torch.tensor([tokens[:-1]]), return_shared_kv_states=True)
    # Its sliding mask shows W + 1 keys, a model with a window W sees W.
    shared = dict(output.shared_kv_states)
    shared[SLIDING] = tuple(each[:, :, -WINDOW:] for each in shared[SLIDING])
    state, token, found = output.last_hidden_state[:, -1:], tokens[-1], []
    for _ in range(DEPTH):
        inputs = torch.cat([target.model.embed_tokens(torch.tensor([[token]])), state], dim=-1)
        step = assistant(inputs_embeds=inputs, position_ids=torch.tensor([[position]]), shared_kv_states=shared)
        state, token = step.last_hidden_state, int(step.logits[0, -1].argmax())
        found.append((step.logits[0, -1], state[0, -1]))
    return found


def last_rows(caches: list[SequenceCache]) -> PassRows:
    """A row for each sequence, at its last committed position; queries may be turned one further."""
    rows = rows_of([Part(cache, cache.length - 1, 1) for cache in caches])
    rows.longest += 1
    return rows


@pytest.mark.parametrize("position", ["n-1", "n"])
@pytest.mark.parametrize("clusters", [0, 20])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_logits_and_states_are_those_of_transformers(
    variant: str, clusters: int, position: str, tmp_path: Path
) -> None:
    """Two sequences together, one shorter than the window and one beyond it; a few steps of each."""
    target = random_gemma(variant)
    theirs = random_assistant(target, clusters=clusters)
    model = load(save_gemma(tmp_path / "t", target), KERNELS["cpu"]())
    mine = attach(save_assistant(tmp_path / "a", theirs), model, position)
    pool = PagePool.for_model(model.config, 40, 8, torch.float32, CPU)
    caches, hidden, expected = [], [], []
    for tokens, length in zip(TOKENS, (7, 40), strict=True):
        cache = SequenceCache(pool)
        feed(model, cache, tokens[: length - 3], prefill=True)
        cache.grow(length + 4)
        feed(model, cache, tokens[length - 3 : length], prefill=False)
        caches.append(cache)
        output = target.model(torch.tensor([tokens[:length]]))
        hidden.append(output.last_hidden_state[0, -1])
        expected.append(expected_steps(target, theirs, tokens[: length + 1], length - 1 + ["n-1", "n"].index(position)))
    rows, state = last_rows(caches), torch.stack(hidden)
    tokens = torch.tensor([TOKENS[0][7], TOKENS[1][40]])
    for step in range(DEPTH):
        found = mine.forward(state, Pass(tokens, rows, pool.layers, None))
        logits, state = mine.logits(found), mine.project(found)
        for row in range(2):
            wanted, projected = expected[row][step]
            seen = logits[row] > float("-inf")
            assert int(seen.sum()) == (75 if clusters else 300)
            torch.testing.assert_close(logits[row][seen], wanted[seen], atol=1e-4, rtol=0)
            torch.testing.assert_close(state[row], projected, atol=1e-4, rtol=0)
        tokens = logits.argmax(dim=1)


@torch.inference_mode()
def test_the_reference_kernels_agree(tmp_path: Path) -> None:
    target = random_gemma("E4B")
    folder, draft = save_gemma(tmp_path / "t", target), save_assistant(tmp_path / "a", random_assistant(target))
    found = []
    for kernels in KERNELS.values():
        model = load(folder, kernels())
        mine = attach(draft, model)
        cache = SequenceCache(PagePool.for_model(model.config, 8, 8, torch.float32, CPU))
        feed(model, cache, TOKENS[0][:20], prefill=True)
        batch = Pass(torch.tensor([9]), last_rows([cache]), cache.pool.layers, None)
        found.append(mine.logits(mine.forward(torch.ones(1, 48), batch)))
    torch.testing.assert_close(*found, atol=1e-4, rtol=0)


MISFITS = {
    "hidden size of 64, not 48": {"backbone_hidden_size": 64},
    "310 tokens, not 300": {"vocab_size": 310},
    "key/value heads of its sliding_attention layers: 4, not 2": {"num_key_value_heads": 4},
    "columns of a head of its sliding_attention layers: 8, not 16": {"head_dim": 8},
    "columns of a head of its full_attention layers: 16, not 32": {"global_head_dim": 16},
    "window of its sliding_attention layers: 9, not 12": {"sliding_window": 9},
    "rotary settings of its full_attention layers": {
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            FULL: {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.25},
        }
    },
}


@pytest.mark.parametrize("wrong", MISFITS)
def test_what_does_not_fit_is_named(wrong: str, tmp_path: Path) -> None:
    target = random_gemma("31B")
    model = load(save_gemma(tmp_path / "t", target), ReferenceKernels())
    folder = save_assistant(tmp_path / "a", random_assistant(target, **MISFITS[wrong]))
    (folder / "model.safetensors").unlink()  # it is found out before weights are read
    config = read_assistant(ConfigReader(read_json(folder), str(folder / "config.json")))
    with pytest.raises(ForerunError, match="does not fit the model") as caught:
        fitting_layers(config, model.config)
    assert wrong in str(caught.value) and str(folder) in str(caught.value)


def test_every_layer_must_fit_and_not_only_the_first_of_its_kind(tmp_path: Path) -> None:
    target = random_gemma("31B")
    model = load(save_gemma(tmp_path / "t", target), ReferenceKernels())
    values = read_json(save_assistant(tmp_path / "a", random_assistant(target)))
    values["text_config"]["per_layer_config"]["1"] = {"head_dim": 8}
    config = read_assistant(ConfigReader(values, "config.json"))
    with pytest.raises(ForerunError, match="columns of a head of its sliding_attention layers: 8, not 16"):
        fitting_layers(config, model.config)


def test_a_foreign_target_and_a_broken_order_are_refused(tmp_path: Path) -> None:
    from tiny import tiny_model

    target = random_gemma("E4B")
    broken = random_assistant(target, clusters=20)
    broken.masked_embedding.token_ordering[3] = broken.masked_embedding.token_ordering[4]
    folder = save_assistant(tmp_path / "a", broken)
    with pytest.raises(ForerunError, match="every token once"):
        attach(folder, load(save_gemma(tmp_path / "t", target), ReferenceKernels()))
    with pytest.raises(ForerunError, match="the model has no sliding_attention layer"):
        attach(folder, load(tiny_model(tmp_path / "l", "llama"), ReferenceKernels()))


def assisted(model: Decoder, folder: Path, **options: Any) -> Engine:
    return engine(model, beside=[AssistantDrafter(attach(folder, model), VOCAB)], **options)


@pytest.fixture(scope="module")
def trained(gemma_pair: Path) -> tuple[Decoder, Path]:
    """A target in the manner of E4B and an assistant that is often right about it."""
    return decoder(gemma_pair / "target", quantize=False), gemma_pair / "assistant"


@pytest.fixture(params=["trained", "26B-A4B", "31B", "12B"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Decoder, Path]:
    """One whose drafts are accepted, and random ones of other variants, whose drafts are rejected."""
    if request.param == "trained":
        found: tuple[Decoder, Path] = request.getfixturevalue("trained")
        return found
    target = random_gemma(request.param)
    return decoder(save_gemma(tmp_path / "t", target), quantize=False), save_assistant(
        tmp_path / "a", random_assistant(target)
    )


PROMPTS = [[45, 76, 73], [(37 * n + 11) % VOCAB for n in range(30)], [81] * 12]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_change_nothing(pair: tuple[Decoder, Path], temperature: float) -> None:
    """Alone and side by side, each with its own length and window, to either side of it."""
    asked = {"temperature": temperature, "seed": 3, "max_tokens": 30}
    plain = [sequence.answer for sequence in run(engine(pair[0]), *(request(p, **asked) for p in PROMPTS))]
    machine = assisted(*pair)
    for depth in range(1, 7):
        wishes = [request(p, draft="assistant", draft_tokens=depth, **asked) for p in PROMPTS]
        found = run(machine, *wishes)
        assert [sequence.answer for sequence in found] == plain
        assert all(s.counters.drafted >= 25 * depth // (depth + 1) for s in found)
        if len(pair[0].config.layers) == 4 and pair[0].config.per_layer is not None:  # the trained one
            assert sum(s.counters.accepted for s in found) > (8 if temperature else 20)
    (alone,) = run(machine, request(PROMPTS[1], draft="mtp", draft_tokens=3, **asked))
    assert alone.answer == plain[1] and "assistant" in alone.counters.arms, "mtp is another word for it"


def test_an_end_token_inside_a_round(trained: tuple[Decoder, Path]) -> None:
    (plain,) = run(engine(trained[0]), request(PROMPTS[0], max_tokens=30))
    for place in range(4, 16):
        stop = frozenset({plain.answer[place]})
        first = plain.answer.index(plain.answer[place])
        wish = request(PROMPTS[0], max_tokens=30, stop_ids=stop, draft="assistant", draft_tokens=5)
        (found,) = run(assisted(*trained), wish)
        assert (found.answer, found.finish_reason) == (plain.answer[:first], "stop")


def test_a_storm(trained: tuple[Decoder, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.engine.scheduler.DEFAULT_ANSWER", 4)
    dice = random.Random(7)
    arms, faults = ["off", "lookup", "assistant", "assistant", "auto"], ["propose", "step", "sink", "close", "observe"]
    visits = [random_visit(dice, arms, faults, 16, arrives=number) for number in range(40)]
    storm = Storm(assisted(*trained, pages=16, context=72), visits)
    storm.engine.scheduler.max_sequences = 6
    storm.break_passes({40: RuntimeError("no pass")})
    storm.run()
    storm.compare(engine(trained[0], context=72))
    assert storm.seen["parked"] and storm.seen["accepted"] > 5 and storm.seen["length"], storm.seen
    assert storm.seen["fault in step"] and storm.engine.pool.free == storm.engine.pool.count


@torch.inference_mode()
def probabilities_of(model: Decoder, text: list[int]) -> dict[int, float]:
    """Of the two likeliest tokens, as a top-k of 2 and a temperature of 2 leave them."""
    cache = SequenceCache(PagePool.for_model(model.config, 8, 8, torch.float32, CPU))
    top = feed(model, cache, text, prefill=True)[-1][:VOCAB].topk(2)
    return dict(zip(top.indices.tolist(), (top.values.double() / 2).softmax(0).tolist(), strict=True))


def test_rejection_has_the_distribution_of_plain_sampling(trained: tuple[Decoder, Path]) -> None:
    """Drafts are the likeliest tokens, so their distribution is one-hot: χ² of three tokens after a prompt."""
    from scipy.stats import chi2

    machine, asked = assisted(*trained), {"max_tokens": 3, "temperature": 2.0, "top_k": 2, "accept": "rejection"}
    answer = run(machine, request(PROMPTS[0], max_tokens=40))[0].answer

    def sampled(prompt: list[int], tries: int) -> tuple[list[Any], float]:
        wishes = [request(prompt, seed=seed, draft="assistant", draft_tokens=1, **asked) for seed in range(tries)]
        found = run(machine, *wishes)
        return found, sum(s.counters.accepted for s in found) / sum(s.counters.drafted for s in found)

    prompts = (PROMPTS[0] + answer[:length] for length in range(12, 40, 3))
    prompt = next(prompt for prompt in prompts if 0.2 < sampled(prompt, 10)[1] < 0.8)  # some drafts are accepted
    expected = {
        (a, b, c): p * q * r
        for a, p in probabilities_of(trained[0], prompt).items()
        for b, q in probabilities_of(trained[0], [*prompt, a]).items()
        for c, r in probabilities_of(trained[0], [*prompt, a, b]).items()
    }
    found, accepted = sampled(prompt, 300)
    assert 0.1 < accepted < 0.9
    counts = Counter(tuple(s.answer) for s in found)
    assert counts.keys() <= expected.keys()
    cells = {key: p * len(found) for key, p in expected.items() if p * len(found) >= 5}
    pairs = [(counts[key], wanted) for key, wanted in cells.items()]
    rest = len(found) - sum(cells.values())
    if rest >= 1:
        pairs.append((len(found) - sum(counts[key] for key in cells), rest))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in pairs)
    assert len(pairs) > 1 and statistic < chi2.ppf(0.9999, len(pairs) - 1)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@torch.inference_mode()
def test_constraints_hold_with_drafts_and_without(trained: tuple[Decoder, Path], temperature: float) -> None:
    asked = {"temperature": temperature, "seed": 5, "max_tokens": 16}

    def answers(machine: Engine, **options: Any) -> list[list[int]]:
        wish = request(PROMPTS[0], **asked, **options)
        found = [machine.submit(wish, NoText(), ByRule(random_rule(seed, VOCAB), VOCAB)) for seed in range(3)]
        finish(machine, found)
        assert not any(sequence.error or sequence.warnings for sequence in found)
        return [sequence.answer for sequence in found]

    plain = answers(engine(trained[0]))
    assert answers(assisted(*trained), draft="assistant", draft_tokens=4) == plain
    assert len({tuple(answer) for answer in plain}) > 1, "the rules are felt"


@pytest.mark.parametrize("name", ASSISTANTS)
def test_the_shapes_of_measurements_are_those_of_real_pairs(name: str) -> None:
    """An assistant's layers read the last layer of their kind that has keys and values of its own."""
    target = read_config(ConfigReader(SHAPES[name], name))
    layers = fitting_layers(read_assistant(ConfigReader(ASSISTANTS[name], name)), target)
    sources = [layer.mixer.source for layer in layers if isinstance(layer.mixer, AttentionConfig)]
    last = {"Gemma-4-E4B": 23, "Gemma-4-12B": 47, "Gemma-4-26B-A4B": 29}[name]
    assert sources == [last - 1] * 3 + [last]


@pytest.mark.parametrize(("kind", "window"), [("gemma4_text", 512), ("gemma4_unified_text", 1024)])
def test_absent_settings_are_those_of_the_language_model(kind: str, window: int) -> None:
    text = {"model_type": kind, "hidden_size_per_layer_input": 0}
    config = {"model_type": "gemma4_assistant", "backbone_hidden_size": 8, "text_config": text}
    assert read_assistant(ConfigReader(config, "config.json")).mixers[0].spec.window == window
