"""Proof on demand in this process: two decodings compared, and a token that speculation got wrong is found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_model

import forerun
from forerun.cli.chat_talkers import LocalReply, LocalTalker
from forerun.cli.main import main
from forerun.engine import runner
from forerun.engine.engine import Engine
from forerun.errors import ForerunError
from forerun.language_model import LanguageModel
from forerun.options import GenerationOptions
from forerun.progress import NullProgress
from forerun.proof import Decoded, Proof, first_difference

REPEATING = "the one and the one and the one and the "
DRAFTED = {"draft": "lookup", "draft_tokens": 4, "logit_bias": {40: 12.0, 41: 12.0}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("m"), "llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def model(folder: Path) -> LanguageModel:
    return forerun.load(str(folder), dtype="float32", quantize="none", max_context=256)


def accept_all(chosen: Sequence[int], drafts: Sequence[int]) -> tuple[int, int]:
    """An engine that believes every draft."""
    return len(drafts), chosen[-1]


@pytest.mark.parametrize(
    ("answer", "plain", "limit", "index"),
    [
        (([5, 6, 7], None, "length"), ([5, 6, 7], None, "length"), 3, None),
        (([5, 6], 2, "stop"), ([5, 6], 2, "stop"), 9, None),
        (([5, 6, 7], None, "length"), ([5, 8, 7], None, "length"), 3, 1),
        (([5, 6], 2, "stop"), ([5, 6], 0, "stop"), 9, 2),  # another end token
        (([5, 6], 2, "stop"), ([5, 6], None, "stop"), 9, 2),  # a stop string ended one
        (([5, 6], None, "stop"), ([5, 6, 7], None, "stop"), 9, 2),
        (([5, 6, 7, 8], None, "length"), ([5, 6, 7], None, "length"), 3, 3),  # more than was allowed
        (([5, 6], None, "length"), ([5, 6, 7], 2, "stop"), 9, None),  # no room for more: the rest is not known
        (([5, 6, 7], 2, "stop"), ([5, 6], None, "length"), None, None),
        (([], 2, "stop"), ([5], 2, "stop"), 9, 0),
    ],
)
def test_where_two_decodings_part(answer: Any, plain: Any, limit: int | None, index: int | None) -> None:
    assert first_difference(Decoded(*answer), Decoded(*plain), limit) == index


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.9, "seed": 5},
        {"stop": ["e"]},
        {"max_tokens": 1},
        {"draft": "auto", "draft_tokens": "auto"},
    ],
)
def test_what_was_drafted_is_proved(model: LanguageModel, options: dict[str, Any]) -> None:
    wish = {"max_tokens": 40, **DRAFTED, **options}
    proved, unproved = (forerun.generate(model, REPEATING, **wish, prove=p) for p in (True, False))
    assert unproved.proof is None
    assert proved.proof == Proof(True, proved.completion_tokens)
    assert proved.proof.to_dict() == {"identical": True, "tokens": proved.completion_tokens}
    assert proved.text == unproved.text
    if wish["draft"] == "lookup":  # what it took is what the answer took
        assert (proved.rounds, proved.drafted) == (unproved.rounds, unproved.drafted)
    if not options:
        assert proved.accepted > 0, "else there is nothing to prove"
    assert not model.engine.scheduler.active


def test_a_wrong_token_is_found(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = forerun.generate(model, REPEATING, max_tokens=40, draft="off")
    monkeypatch.setattr(runner, "accept_coupled", accept_all)
    response = forerun.generate(model, REPEATING, max_tokens=40, draft="lookup", draft_tokens=4, seed=3, prove=True)
    assert response.tokens != plain.tokens
    index = next(i for i, (a, b) in enumerate(zip(response.tokens, plain.tokens, strict=False)) if a != b)
    assert response.proof is not None
    found = response.proof.to_dict()
    assert (found["identical"], found["choice"], found["index"], found["tokens"]) == (False, 0, index, index)
    assert found["token"] == {"id": response.tokens[index], "text": model.tokenizer.decode([response.tokens[index]])}
    assert found["plain"]["id"] == plain.tokens[index]
    for part in (f"token {index} of choice 0", model.name, "seed 3", "draft lookup", forerun.__version__):
        assert part in found["report"]
    assert REPEATING not in found["report"]


def test_an_answer_that_was_stopped_is_not_proved_until_it_goes_on(model: LanguageModel) -> None:
    with forerun.stream(model, REPEATING, max_tokens=40, **DRAFTED, prove=True) as generation:
        for _ in range(3):
            next(generation)
        generation.cancel()
        assert [*generation][-1].response.proof is None  # type: ignore[union-attr]
        generation.extend(10)
        last = [*generation][-1].response
        assert last is not None and last.proof == Proof(True, last.completion_tokens) and last.completion_tokens >= 13


def test_a_second_decoding_that_fails_loses_nothing(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, asked = Engine.submit, list[str]()

    def refusing(engine: Engine, request: Any, *more: Any) -> Any:
        asked.append(request.draft)
        if len(asked) > 1:
            raise ForerunError("no room")
        return submit(engine, request, *more)

    monkeypatch.setattr(Engine, "submit", refusing)
    response = forerun.generate(model, REPEATING, max_tokens=8, **DRAFTED, prove=True)
    assert asked == ["lookup", "off"] and response.completion_tokens == 8
    assert response.proof is not None and response.proof.to_dict() == {
        "identical": None,
        "tokens": 0,
        "error": "no room",
    }


def test_rejection_has_nothing_to_prove(model: LanguageModel) -> None:
    with pytest.raises(ForerunError, match="nothing to prove: drop one"):
        forerun.generate(model, "hi", accept="rejection", prove=True)
    assert forerun.generate(model, "hi", accept="rejection", max_tokens=3).accept == "rejection"


def test_the_command_says_so(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["generate", "-m", str(folder), "-p", REPEATING, "-n", "30", "--dtype", "float32", "--max-context", "256"]
    line += ["--quantize", "none", "--draft", "lookup", "--draft-tokens", "4", "--prove"]
    assert main(line) == 0
    assert "proved: 30 tokens identical to plain decoding\n" in capsys.readouterr().err
    assert main([*line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["proof"] == {"identical": True, "tokens": 30}
    monkeypatch.setattr(runner, "accept_coupled", accept_all)
    assert main([*line, "--quiet"]) == 1
    assert "forerun: DIFFERENT from plain decoding: token " in capsys.readouterr().err
    assert main([*line, "--accept", "rejection"]) == 2


def test_a_chat_says_so_and_samples_as_the_models_makers_recommend(model: LanguageModel) -> None:
    talker = LocalTalker(replace(model, generation_defaults={"temperature": 0.9, "top_k": 5}), "tiny", NullProgress())
    options = GenerationOptions(max_tokens=8, seed=2, prove=True)
    with closing(talker.answer([{"role": "user", "content": REPEATING}], options)) as reply:
        assert list(reply)
        assert isinstance(reply, LocalReply) and reply._generation.sequence.request.sampling.top_k == 5
        assert reply.summary().proof == "proved: 8 tokens identical to plain decoding"
