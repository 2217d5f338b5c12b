"""Rollback of recurrent state as a property: whatever drafts were accepted, bits equal those of a plain run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import CPU, VOCAB, NoText, Scripted, decoder, engine, finish, pool_for, request, run
from hypothesis import given, settings
from hypothesis import strategies as st
from passes import recurrent
from test_rollback import contents
from tiny_qwen import tiny_qwen

from forerun.cache.pages import SequenceCache
from forerun.draft.model import ModelDrafter
from forerun.engine.probe import probe
from forerun.engine.sequence import Status
from forerun.errors import ForerunError
from forerun.kernels.interface import WIDEST
from forerun.kernels.reference import ReferenceKernels
from forerun.models.families import build
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.mixers import DeltaMixer
from forerun.models.layers.rows import make_pass
from forerun.progress import NullProgress
from forerun.weights.checkpoint import open_checkpoint

PROMPT = [11, 22, 33, 44, 55, 66, 77, 88, 99, 111, 122, 133, 144, 155, 166, 177, 188, 199, 210]
ANSWER = 50
Rounds = list[tuple[int, int]]


@pytest.fixture(scope="module", params=["dense int8", "dense float32", "sparse int8", "dense reference"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    kind, precision = request.param.split()
    folder = tiny_qwen(tmp_path_factory.mktemp("m"), sparse=kind == "sparse")
    if precision == "reference":
        return build(open_checkpoint(folder), ReferenceKernels(), CPU, torch.float32, NullProgress())
    return decoder(folder, quantize=precision == "int8")


def state_of(model: Decoder, cache: SequenceCache) -> list[torch.Tensor]:
    """Recurrent states and convolution inputs at the cache's length, rows that wait for a replay replayed on a copy."""
    states = cache.pool.states
    assert states is not None and cache.slot is not None
    mark = cache.snapshot()
    cache.begin(0, prompt=False)
    rows = recurrent([(cache.slot, 0)], states.layers, None, CPU)
    for block in model.layers:
        mixer = block.mixer
        if isinstance(mixer, DeltaMixer):
            layout = mixer.layout
            mixed, gates = torch.empty(0, layout.width), torch.empty(0, 2 * layout.value_heads)
            model.kernels.recurrence(mixed, gates, layout, rows, mixer.index, mixer.convolution, mixer.decay)
    found = []
    for layer in states.layers:
        found += [layer.state[cache.slot].clone(), layer.inputs[cache.slot, :3].clone()]
    cache.restore(mark)
    return found


@pytest.fixture(scope="module")
def plain(model: Decoder) -> tuple[list[int], dict[int, list[torch.Tensor]], torch.Tensor]:
    """A run without drafts: its tokens, the states it went through by length, keys and values at the end."""
    machine = engine(model)
    sequence = machine.submit(request(PROMPT, max_tokens=ANSWER), NoText())
    states = {}
    with torch.inference_mode():
        while sequence.status is not Status.FINISHED:
            machine.step()
            states[sequence.cache.length] = state_of(model, sequence.cache)
    return sequence.tokens, states, contents(sequence, sequence.cache.length)


def truth_then_garbage(tokens: list[int], rounds: Rounds) -> Any:
    """Drafts of some right tokens and then some wrong ones, as planned round by round."""
    plan = iter(rounds)

    def script(text: list[int], depth: int) -> list[int]:
        right, wrong = next(plan, (0, 0))
        truth = tokens[len(text) : len(text) + right]
        return [*truth, *[(t + 1) % VOCAB for t in tokens[len(text) + right : len(text) + right + wrong]]]

    return script


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=12))
def test_states_equal_a_plain_run_after_every_round(model: Decoder, plain: Any, rounds: Rounds) -> None:
    tokens, states, expected = plain
    machine = engine(model)
    machine.drafters.texts["lookup"] = Scripted(truth_then_garbage(tokens, rounds))
    sequence = machine.submit(request(PROMPT, max_tokens=ANSWER, draft="lookup", draft_tokens=15), NoText())
    with torch.inference_mode():
        while sequence.status is not Status.FINISHED:
            machine.step()
            length = sequence.cache.length
            assert sequence.tokens == tokens[: len(sequence.tokens)]
            for found, known in zip(state_of(model, sequence.cache), states[length], strict=True):
                assert torch.equal(found, known)
            assert torch.equal(contents(sequence, length), expected[..., :length])
    assert sequence.tokens == tokens


@settings(max_examples=6, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=8), st.data())
def test_same_tokens_in_mixed_batches(model: Decoder, plain: Any, rounds: Rounds, data: st.DataObject) -> None:
    """One plain, one with lookup, one scripted, one sampled, one of them parked now and then."""
    tokens = plain[0]
    sampled = {"temperature": 0.9, "seed": 3, "max_tokens": 30}
    (alone,) = run(engine(model), request(PROMPT[::-1], **sampled))
    machine = engine(model)
    machine.drafters.texts["model"] = Scripted(truth_then_garbage(tokens, rounds), name="model")
    asked = [
        request(PROMPT, max_tokens=ANSWER),
        request(PROMPT, max_tokens=ANSWER, draft="lookup"),
        request(PROMPT, max_tokens=ANSWER, draft="model", draft_tokens=12),
        request(PROMPT[::-1], draft="lookup", **sampled),
    ]
    sequences = [machine.submit(r, NoText()) for r in asked]
    parked = data.draw(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), max_size=3))
    with torch.inference_mode():
        for step in range(200):
            for when, who in parked:
                if when == step and sequences[who].status is Status.RUNNING:
                    sequences[who].cache.park()
                    sequences[who].status = Status.PARKED
            machine.step()
    assert [s.tokens for s in sequences] == [tokens, tokens, tokens, alone.tokens]
    for sequence in sequences:
        machine.release(sequence)
    machine.pool.check([])


@torch.inference_mode()
def test_an_interrupted_pass_leaves_no_trace(model: Decoder, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some layers have run and some have not: the same pass again gives the same tokens."""
    tokens = plain[0]
    machine = engine(model)
    sequence = machine.submit(request(PROMPT, max_tokens=ANSWER), NoText())
    whole, calls = DeltaMixer.forward, 0

    def breaks(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls % 7 == 0:
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(DeltaMixer, "forward", breaks)
    interrupted = 0
    while sequence.status is not Status.FINISHED:
        try:
            machine.step()
        except KeyboardInterrupt:
            interrupted += 1
    assert sequence.tokens == tokens and interrupted > 10


def test_parking_keeps_every_bit(model: Decoder) -> None:
    machine = engine(model)
    sequence = machine.submit(request(PROMPT, max_tokens=20), NoText())
    finish(machine, [sequence])
    before = state_of(model, sequence.cache)
    sequence.cache.park()
    assert sequence.cache.slot is None
    other = machine.submit(request(PROMPT[::-1], max_tokens=20), NoText())  # takes pages and slot
    finish(machine, [other])
    sequence.cache.unpark()
    for found, known in zip(state_of(model, sequence.cache), before, strict=True):
        assert torch.equal(found, known)
    machine.pool.check([sequence.cache, other.cache])


@torch.inference_mode()
def test_the_probe_passes(model: Decoder) -> None:
    pool = pool_for(model)
    assert probe(model, pool, [2, 3, 4, 5, 8, 12, 16]).guaranteed
    pool.check([])


@torch.inference_mode()
def test_the_probe_finds_a_replay_that_changes_bits(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.cache.recurrent import StateSlots

    whole = StateSlots.commit

    def careless(self: StateSlots, slot: int, staged: Any, count: int) -> None:
        whole(self, slot, staged, count if staged is not None else max(0, count - 1))

    monkeypatch.setattr(StateSlots, "commit", careless)
    assert not probe(model, pool_for(model), [4]).guaranteed


def test_more_sequences_than_slots_wait_their_turn(model: Decoder, plain: Any) -> None:
    machine = engine(model)
    asked = [request(PROMPT, max_tokens=6) for _ in range(9)]  # six slots
    assert [s.tokens for s in run_and_release(machine, asked)] == [plain[0][: len(PROMPT) + 6]] * 9


def run_and_release(machine: Any, asked: list[Any]) -> list[Any]:
    """Finished sequences keep their slot until someone needs it."""
    sequences = [machine.submit(r, NoText()) for r in asked]
    finish(machine, sequences)
    for sequence in sequences:
        machine.release(sequence)
    machine.pool.check([])
    return sequences


def test_a_wide_pass_is_committed_whole(model: Decoder) -> None:
    cache = SequenceCache(pool_for(model))
    cache.grow(40)
    with torch.inference_mode():
        model.forward(make_pass([(cache, list(range(WIDEST + 1)))], last_only=True))
        with pytest.raises(AssertionError, match="whole"):
            cache.commit(3)
    cache.release()


def test_a_recurrent_model_does_not_draft_for_another(model: Decoder) -> None:
    with pytest.raises(ForerunError, match="cannot draft"):
        ModelDrafter(model, VOCAB)
