"""Edits on the device: the logits of `reference.processed`, to the bit, round after round."""

import itertools
import random

import numpy as np
import pytest
import torch

from forerun.kernels.gpu import editing
from forerun.kernels.gpu.choosing import BROKEN, choose_tokens
from forerun.kernels.gpu.committing import accept
from forerun.kernels.gpu.editing import edit_drafts, edit_rows, remember
from forerun.sample import Row, SamplingParams, TokenHistory, reference
from forerun.sample.device_edits import EditBuffers
from forerun.sample.processors import process_torch

pytestmark = pytest.mark.kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INF = float("inf")
NAN = float("nan")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(editing, "BLOCK", 64)


def bits(logits):
    """float32 as integers: −0 is not 0, and NaN is itself."""
    return logits.cpu().contiguous().view(torch.int32)


def random_params(rng, vocab, bias=True, repetition=True, presence=True, frequency=True):
    """Numbers that no float32 holds; some ids lie beyond the vocabulary."""
    some = rng.sample(range(vocab + 9), min(vocab, 12))
    return SamplingParams(
        logit_bias={token: rng.uniform(-9, 9) for token in some[:6]} | {some[-1]: -INF} if bias else {},
        suppress=frozenset(some[-3:]) if bias else frozenset(),
        repetition_penalty=rng.choice([0.7, 1.1, 3.3]) if repetition else 1.0,
        presence_penalty=rng.uniform(-2, 2) if presence else 0.0,
        frequency_penalty=rng.uniform(-2, 2) if frequency else 0.0,
    )


def random_history(rng, vocab, length=20):
    """An answer of few distinct ids, so that they come again, after a prompt that also has others."""
    prompt = rng.choices(range(vocab + 3), k=length)  # some are beyond the vocabulary
    return TokenHistory(prompt, rng.choices([*prompt[:3], *rng.choices(range(vocab + 3), k=3)], k=length))


def random_logits(rng, rows, columns):
    """With zeros of both signs, ties and −∞ among them."""
    numbers = np.random.default_rng(rng.randrange(2**32))
    logits = torch.from_numpy(numbers.standard_normal((rows, columns)).astype(np.float32) * 5)
    for value in (0.0, -0.0, -INF, 1.5, 1e-45, 1e30):
        logits[torch.from_numpy(numbers.random((rows, columns)) < 0.03)] = value
    logits[:, 0] = 1.0  # never all of them are −∞
    return logits


def words_of(allowed):
    """A mask bool [rows, vocab] as words of 32 tokens, the lowest bit first."""
    vocab = allowed.shape[1]
    padded = torch.nn.functional.pad(allowed, (0, -vocab % 32)).numpy()
    return np.packbits(padded, axis=1, bitorder="little").view("<i4")


def edited_rows(buffers, logits, vocab, tokens):
    out = torch.full(logits.shape, NAN, device=DEVICE)
    edit_rows(logits.to(DEVICE), vocab, tokens.to(DEVICE), buffers.tables, out)
    assert out[:, vocab:].isnan().all()  # nothing is written there
    return out[:, :vocab]


def expected_rows(params, histories, logits, vocab, tokens, allowed=None):
    """What the reference makes of every row of a round; `allowed`: a mask or None for each row."""
    width = tokens.shape[1]
    rows = [
        Row(params[slot], histories[slot], tuple(tokens[slot, 1 : 1 + place].tolist()), 0)
        for slot in range(len(tokens))
        for place in range(width)
    ]
    for row, mask in zip(rows, allowed or [], strict=False):
        row.allowed = None if mask is None else words_of(mask[None])[0]
    return reference.processed(logits, rows, vocab)


def twin(tables, logits, vocab, tokens):
    """The kernel once more, in plain torch: token by token, from the same tables."""
    tables = type(tables)(*(table.cpu() for table in tables))
    out = logits[:, :vocab].float() + 0.0
    count, width = tokens.shape
    for slot, place in itertools.product(range(count), range(width)):
        biased, repetition, presence, frequency = tables.settings[slot].tolist()
        line, used = out[slot * width + place], tables.used[slot].clone()
        for token in tokens[slot, 1 : 1 + place].tolist():
            used[token] += 2
        if biased:
            line.copy_(line.double() + tables.bias[slot, :vocab])
        for token in range(vocab):
            word = int(tables.masks[slot, place, token // 32])
            if tables.masked[slot, place] and not word >> token % 32 & 1:
                line[token] = -INF
            count_in_answer, value = int(used[token]) // 2, float(line[token])
            if used[token]:
                line[token] = value / repetition if value > 0 else value * repetition
            if count_in_answer:
                line[token] = float(line[token]) - (count_in_answer * frequency + presence)
    return out


@pytest.mark.parametrize("kinds", list(itertools.product([False, True], repeat=4)))
def test_all_combinations_have_the_bits_of_the_reference(kinds):
    rng, vocab, width = random.Random(str(kinds)), 150, 3
    buffers = EditBuffers(3, vocab, DEVICE)
    params, histories = random_params(rng, vocab, *kinds), random_history(rng, vocab)
    assert params.needs_edits == any(kinds)
    buffers.join(1, params, histories)
    neighbours = [SamplingParams(), params, SamplingParams()]
    tokens = torch.tensor([[rng.randrange(9) for _ in range(width)] for _ in range(3)])
    logits = random_logits(rng, 3 * width, vocab + 7)
    expected = expected_rows(neighbours, [histories] * 3, logits, vocab, tokens)
    assert torch.equal(bits(edited_rows(buffers, logits, vocab, tokens)), bits(expected))
    assert torch.equal(expected, logits[:, :vocab]) == (not any(kinds))


@pytest.mark.parametrize("vocab", [1, 31, 64, 65, 200])
def test_vocabularies_that_are_no_multiple_of_anything(vocab):
    rng, width = random.Random(vocab), 16
    buffers = EditBuffers(2, vocab, DEVICE)
    params = [random_params(rng, vocab, bias=vocab > 1), random_params(rng, vocab, bias=False)]
    histories = [random_history(rng, vocab) for _ in params]
    for slot in range(2):
        buffers.join(slot, params[slot], histories[slot])
    tokens = torch.tensor([[rng.randrange(min(vocab, 9)) for _ in range(width)] for _ in range(2)])
    logits = random_logits(rng, 2 * width, vocab)
    expected = expected_rows(params, histories, logits, vocab, tokens)
    assert torch.equal(bits(edited_rows(buffers, logits, vocab, tokens)), bits(expected))


def test_a_row_sees_the_drafts_before_it_and_not_its_own_or_the_pending_token():
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5)
    buffers = EditBuffers(1, 8, DEVICE)
    buffers.join(0, params, TokenHistory([1], [2]))
    out = edited_rows(buffers, torch.zeros(4, 8), 8, torch.tensor([[2, 5, 2, 5]]))
    assert out.tolist() == [
        [0, 0, -1.5, 0, 0, 0, 0, 0],
        [0, 0, -1.5, 0, 0, -1.5, 0, 0],
        [0, 0, -2.0, 0, 0, -1.5, 0, 0],
        [0, 0, -2.0, 0, 0, -2.0, 0, 0],
    ]


def test_grammar_masks_belong_to_rows():
    rng, vocab, width = random.Random(5), 100, 4
    buffers = EditBuffers(2, vocab, DEVICE)
    params = [random_params(rng, vocab), SamplingParams()]
    histories = [random_history(rng, vocab) for _ in params]
    masks = torch.rand(2, width, vocab, generator=torch.Generator().manual_seed(0)) < 0.5
    masks[:, :, 0] = True
    for slot in range(2):
        buffers.join(slot, params[slot], histories[slot])
    buffers.mask(1, words_of(masks[1]))
    buffers.mask(0, words_of(masks[0]))
    buffers.mask(0, words_of(masks[0, :2]))  # the last rows of slot 0 have none any more
    tokens = torch.tensor([[rng.randrange(9) for _ in range(width)] for _ in range(2)])
    logits = random_logits(rng, 2 * width, vocab)
    allowed = [*masks[0, :2], None, None, *masks[1]]
    expected = expected_rows(params, histories, logits, vocab, tokens, allowed)
    assert torch.equal(bits(edited_rows(buffers, logits, vocab, tokens)), bits(expected))
    assert torch.equal(expected, twin(buffers.tables, logits, vocab, tokens))
    buffers.clear(1)
    assert torch.equal(edited_rows(buffers, logits, vocab, tokens)[width:].cpu(), logits[width:])


def test_a_slot_is_seated_again_without_its_past_and_without_disturbing_others():
    rng, vocab = random.Random(6), 90
    buffers = EditBuffers(3, vocab, DEVICE)
    params = [random_params(rng, vocab) for _ in range(3)]
    histories = [random_history(rng, vocab) for _ in range(3)]
    for slot in (0, 1, 2, 1):
        if slot == 1:
            params[1], histories[1] = random_params(rng, vocab), random_history(rng, vocab)
        buffers.join(slot, params[slot], histories[slot])
    tokens, logits = torch.zeros(3, 1, dtype=torch.int64), random_logits(rng, 3, vocab)
    expected = expected_rows(params, histories, logits, vocab, tokens)
    assert torch.equal(bits(edited_rows(buffers, logits, vocab, tokens)), bits(expected))
    buffers.join(1, SamplingParams(temperature=0.5), histories[1])
    params[1] = SamplingParams()
    expected = expected_rows(params, histories, logits, vocab, tokens)
    assert torch.equal(bits(edited_rows(buffers, logits, vocab, tokens)), bits(expected))


@pytest.mark.parametrize("broken", [NAN, INF])
@pytest.mark.filterwarnings("ignore:invalid value encountered in add")  # ∞ − ∞, of a broken logit
def test_nothing_hides_a_broken_logit(broken):
    """Suppressed or forbidden by the grammar, it still ends the request, as in the reference."""
    buffers = EditBuffers(3, 40, DEVICE)
    buffers.join(0, SamplingParams(suppress=frozenset([7])), TokenHistory())
    buffers.join(1, SamplingParams(), TokenHistory())
    buffers.mask(1, words_of(torch.arange(40)[None] != 7))
    buffers.join(2, SamplingParams(suppress=frozenset([7])), TokenHistory())
    logits = torch.zeros(3, 40)
    logits[:2, 7] = broken
    edited = edited_rows(buffers, logits, 40, torch.zeros(3, 1, dtype=torch.int64))
    chosen, bad = torch.empty(3, dtype=torch.int64, device=DEVICE), torch.empty(3, dtype=torch.int32, device=DEVICE)
    zeros = torch.zeros(3, 3, dtype=torch.int64, device=DEVICE)
    choose_tokens(edited, 40, zeros[0].double(), zeros, zeros[0].clone(), chosen, bad)
    assert bad.tolist() == [BROKEN, BROKEN, 0]


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # that is what it is about
def test_an_overflow_is_infinite_as_in_the_reference():
    buffers = EditBuffers(1, 4, DEVICE)
    params = SamplingParams(repetition_penalty=0.01, presence_penalty=-100.0)
    history = TokenHistory([1, 2], [2])
    buffers.join(0, params, history)
    logits = torch.tensor([[1.0, -3.4e38, 3.4e38, 2.0]])
    edited = edited_rows(buffers, logits, 4, torch.tensor([[2]]))
    process_torch(logits[0], Row(params, history))
    assert torch.equal(bits(edited), bits(logits)) and edited[0, 2] == INF


def test_remember_counts_what_was_emitted():
    buffers = EditBuffers(5, 10, DEVICE)
    params = SamplingParams(frequency_penalty=1.0)
    for slot in range(4):
        buffers.join(slot, params, TokenHistory([9], [3]))
    chosen = torch.tensor([[3, 3, 5, 3], [1, 2, 3, 4], [4, 4, 4, 4], [7, 7, 7, 7]], device=DEVICE)
    accepted = torch.tensor([2, -1, 3, 3], dtype=torch.int32, device=DEVICE)
    live = torch.tensor([1, 1, 1, 0], dtype=torch.int32, device=DEVICE)
    remember(chosen, accepted, live, buffers.tables)
    out = edited_rows(buffers, torch.zeros(4, 10), 10, torch.zeros(4, 1, dtype=torch.int64))
    assert [{token: -value for token, value in enumerate(line) if value} for line in out.tolist()] == [
        {3: 3.0, 5: 1.0},
        {3: 1.0},
        {3: 1.0, 4: 4.0},
        {3: 1.0},
    ]


@pytest.mark.parametrize("seed", range(4))
def test_rounds_follow_each_other_without_the_host(seed):
    """Edit, choose, accept, remember: after every round the host's history says the same as the tables."""
    rng, vocab, slots, width = random.Random(seed), 70, 4, 1 + 4 * (seed % 2) + seed // 2
    buffers = EditBuffers(6, vocab, DEVICE)
    params = [random_params(rng, vocab, *(rng.random() < 0.7 for _ in range(4))) for _ in range(slots)]
    histories = [random_history(rng, vocab) for _ in range(slots)]
    for slot in range(slots):
        buffers.join(slot, params[slot], histories[slot])

    def numbers(values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    live, pending = [1, 1, 0, 1], torch.zeros(slots, dtype=torch.int64, device=DEVICE)
    position, lengths = numbers([0] * slots), []
    for _ in range(5):
        drafted = [rng.randrange(width) for _ in range(slots)]
        logits = random_logits(rng, slots * width, vocab + 3)
        tokens = torch.tensor([[rng.randrange(12) for _ in range(width)] for _ in range(slots)])
        tokens[:, 0] = pending.cpu()
        for place in range(width - 1):  # half of the drafts are right
            right = expected_rows(params, histories, logits, vocab, tokens).argmax(-1).view(slots, width)[:, place]
            tokens[:, place + 1] = torch.where(
                torch.tensor([rng.random() < 0.5 for _ in live]), right, tokens[:, place + 1]
            )
        expected = expected_rows(params, histories, logits, vocab, tokens)
        edited = edited_rows(buffers, logits, vocab, tokens)
        assert torch.equal(bits(edited), bits(expected))

        chosen, bad = tokens.to(DEVICE).clone(), torch.zeros(slots, width, dtype=torch.int32, device=DEVICE)
        chosen.copy_(edited.argmax(-1).view(slots, width))
        accepted, result = numbers([0] * slots), torch.empty(slots, width + 2, dtype=torch.int64, device=DEVICE)
        bad[1, 0] = 2 * rng.randrange(2)  # sometimes the device cannot decide
        moved = position, accepted, pending, result, numbers([1 << 20] * slots)
        accept(tokens.to(DEVICE), chosen, bad, numbers(drafted), numbers(live), *moved)
        remember(chosen, accepted, numbers(live), buffers.tables)
        for slot in range(slots):
            emitted = chosen[slot, : int(accepted[slot]) + 1].tolist() if live[slot] else []
            lengths.append(len(emitted))
            for token in emitted:
                histories[slot].append(token)
    assert 0 in lengths and (width == 1 or max(lengths) > 1)


@pytest.mark.parametrize("reduced", [False, True])
def test_drafters_edit_their_own_logits_step_by_step(reduced):
    rng, vocab, slots = random.Random(8), 130, 3
    buffers = EditBuffers(slots, vocab, DEVICE)
    params = [random_params(rng, vocab) for _ in range(slots)]
    histories = [random_history(rng, vocab) for _ in range(slots)]
    for slot in range(slots):
        buffers.join(slot, params[slot], histories[slot])
        buffers.mask(slot, words_of(torch.zeros(16, vocab, dtype=torch.bool)))  # of the round before: not for drafts
    ids = torch.tensor(sorted(rng.sample(range(vocab), 75))) if reduced else torch.arange(vocab)
    drafts = torch.tensor([[rng.choice(ids.tolist()[:9]) for _ in range(slots)] for _ in range(4)], device=DEVICE)
    for step in range(4):
        logits = random_logits(rng, slots, len(ids))
        full = torch.full((slots, vocab), -INF).index_copy(1, ids, logits)
        rows = [Row(params[n], histories[n], tuple(drafts[:step, n].tolist()), 0) for n in range(slots)]
        expected = reference.processed(full, rows, vocab)[:, ids]
        out = torch.empty_like(logits, device=DEVICE)
        there = ids.to(DEVICE) if reduced else None
        edit_drafts(logits.to(DEVICE), len(ids), drafts.T, step, buffers.tables, there, out)
        assert torch.equal(bits(out), bits(expected))
