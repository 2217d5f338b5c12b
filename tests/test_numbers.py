"""The numbers a user sees, recomputed from what the drafter proposed and what plain decoding says."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from engines import Scripted
from tiny import tiny_model

import forerun
from forerun.language_model import LanguageModel
from forerun.policy.costs import CostTable
from forerun.response import Response

PROMPT = [5, 6, 7, 8] * 3
TOKENS = 24
DEPTH = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tmp_path_factory.mktemp("model")
    return forerun.load(str(tiny_model(folder, "llama", tie_word_embeddings=True)), dtype="float32")


@dataclass
class Tally:
    """Rounds as they must have been."""

    rounds: int
    drafted: int
    accepted: int
    per_position: list[list[int]]
    decoded: int  # tokens that came out of rounds, an end token among them


def answer(model: LanguageModel, plain: list[int], wrong: set[int], **options: Any) -> tuple[Response, Tally]:
    """An answer drafted by someone who knows it all, but errs at some places, and what its numbers must be.

    `plain` is what plain decoding would say if nothing stopped it.
    """
    proposals: list[tuple[int, list[int]]] = []

    def script(text: list[int], depth: int) -> list[int]:
        at = len(text) - len(PROMPT)
        drafts = [plain[n] ^ 1 if n in wrong else plain[n] for n in range(at, at + depth)]
        proposals.append((at, drafts))
        return drafts

    model.engine.drafters.texts["lookup"] = Scripted(script)
    settings = {"max_tokens": TOKENS, "draft": "lookup", "draft_tokens": DEPTH, **options}
    found = forerun.generate(model, PROMPT, **settings)
    # An end token is chosen, but not part of the answer.
    last = len(found.tokens) + (plain[len(found.tokens)] in model.stop_ids)
    accepted, positions = 0, [[0, 0] for _ in range(DEPTH)]
    covered = 0
    for at, drafts in proposals:
        right = [n for n, token in enumerate(drafts) if drafts[: n + 1] == plain[at : at + n + 1] and at + n < last]
        accepted += len(right)
        covered += min(len(right) + 1, last - at)
        for place in range(len(drafts)):
            positions[place][0] += 1
            positions[place][1] += place in right
    drafted = sum(len(drafts) for _, drafts in proposals)
    rounds = len(proposals) + (last - 1 - covered)  # the others were plain
    return found, Tally(rounds, drafted, accepted, positions, last - 1)


def check(found: Response, tally: Tally) -> None:
    assert (found.rounds, found.drafted, found.accepted) == (tally.rounds, tally.drafted, tally.accepted)
    assert found.per_position == tally.per_position
    assert sum(use.accepted for use in found.arms.values()) == tally.accepted
    assert sum(use.rounds for use in found.arms.values()) == tally.rounds
    decode = found.seconds["decode"]
    assert found.tokens_per_second * decode == pytest.approx(tally.decoded)  # the prefill gave the first token
    assert sum(use.seconds for use in found.arms.values()) == pytest.approx(decode)
    assert found.seconds["draft"] + found.seconds["verify"] == pytest.approx(decode)


WRONG = [set[int](), {3, 8, 9}, set(range(2, 40, 2)), set(range(40))]


@pytest.fixture
def plain(model: LanguageModel) -> list[int]:
    """Longer than the answers, so that drafts may look ahead; no end token ends it."""
    model.stop_ids = frozenset()
    sampled = forerun.generate(model, PROMPT, max_tokens=TOKENS + 8, draft="off", temperature=1.0, seed=4)
    return sampled.tokens


SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 4}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_answer_of_full_length(model: LanguageModel, plain: list[int], wrong: set[int]) -> None:
    found, tally = answer(model, plain, wrong, **SAMPLED)
    assert found.tokens == plain[:TOKENS] and found.finish_reason == "length"
    check(found, tally)
    assert found.tokens_per_round == pytest.approx(tally.decoded / tally.rounds)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("place", range(5, 9))
def test_an_end_token_anywhere_in_the_drafts(
    model: LanguageModel, plain: list[int], wrong: set[int], place: int
) -> None:
    end = plain[place]
    model.stop_ids = frozenset({end})
    found, tally = answer(model, plain, wrong, **SAMPLED)
    assert found.tokens == plain[: plain.index(end)] and found.finish_reason == "stop"
    check(found, tally)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("place", range(5, 9))
def test_a_stop_string_anywhere_in_the_drafts(
    model: LanguageModel, plain: list[int], wrong: set[int], place: int
) -> None:
    texts = [model.tokenizer.decode(plain[:count]) for count in range(len(plain) + 1)]
    pieces = [after[len(before) :] for before, after in pairwise(texts)]
    whole = [n for n, piece in enumerate(pieces) if piece.isascii() and n >= place]  # no pieces of characters
    stop = pieces[whole[0]]
    found, tally = answer(model, plain, wrong, stop=stop, **SAMPLED)
    assert found.finish_reason == "stop" and len(found.tokens) <= whole[0] + 1
    assert found.tokens == plain[: len(found.tokens)]
    check(found, tally)


@pytest.mark.parametrize("wrong", [set[int](), {3, 8, 9}])
@pytest.mark.parametrize("ends", [False, True])
def test_seconds_saved_by_a_named_arm(
    model: LanguageModel, plain: list[int], wrong: set[int], ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positive where plain rounds would have taken longer, negative where they would have been faster."""
    if ends:
        model.stop_ids = frozenset({plain[9]})
    for seconds in (10.0, 0.0):
        monkeypatch.setattr(CostTable, "known", True)
        monkeypatch.setattr(CostTable, "pass_seconds", lambda *_, s=seconds: s)  # of a plain round
        found, tally = answer(model, plain, wrong, **SAMPLED)
        assert found.seconds_saved == pytest.approx(tally.decoded * seconds - found.seconds["decode"])
        assert found.seconds_saved is not None and (found.seconds_saved > 0) == (seconds > 0)


def test_nothing_is_saved_without_drafts(model: LanguageModel) -> None:
    assert forerun.generate(model, PROMPT, max_tokens=4, draft="off").seconds_saved is None


def test_an_answer_of_one_token_has_no_speed(model: LanguageModel) -> None:
    found = forerun.generate(model, PROMPT, max_tokens=1, draft="off")
    assert (found.tokens_per_second, found.rounds, found.seconds["decode"]) == (0.0, 0, 0.0)
