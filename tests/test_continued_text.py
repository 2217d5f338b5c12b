"""An answer that was cut off and goes on has the text of one that never stopped, wherever the cut was."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from tiny import tiny_model

import forerun
from forerun.language_model import LanguageModel
from forerun.response import Response
from forerun.text.answer import AnswerText

TOKENS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return forerun.load(str(tiny_model(tmp_path_factory.mktemp("model"), "llama")), dtype="float32")


@pytest.fixture(scope="module")
def options(model: LanguageModel) -> dict[str, Any]:
    """Characters of two tokens, whole and in pieces, between letters that may begin a stop string."""
    pieces = [token for text in ("é", "a", "b") for token in model.tokenizer(text)["input_ids"]]
    assert len(pieces) == 4
    return {"temperature": 1.0, "seed": 23, "draft": "off", "logit_bias": dict.fromkeys(pieces, 80.0)}


STOPS = [[], ["never seen"], ["bbb\ufffd"], ["aa", "bbb"], ["b\ufffda"]]


def whole(model: LanguageModel, options: dict[str, Any], stop: list[str]) -> Response:
    return forerun.generate(model, "hello", max_tokens=TOKENS, stop=stop, **options)


def test_the_text_has_what_it_takes(model: LanguageModel, options: dict[str, Any]) -> None:
    """Otherwise the tests below would show little: unfinished characters, and beginnings of stop strings."""
    answers = [whole(model, options | {"seed": seed}, []).text for seed in range(20, 30)]
    for piece in ("é", "\ufffd", "ab"):
        assert sum(piece in text for text in answers) > 3


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("seed", range(20, 23))
def test_cancelled_anywhere_and_taken_up_again(
    model: LanguageModel, options: dict[str, Any], seed: int, stop: list[str]
) -> None:
    options = options | {"seed": seed}
    plain = whole(model, options, stop)
    for cut in range(1, len(plain.tokens), 2):
        with forerun.stream(model, "hello", max_tokens=TOKENS, stop=stop, **options) as answer:
            shown = [next(answer).text for _ in range(cut)]
            answer.cancel()
            *rest, last = answer
            shown += [chunk.text for chunk in [*rest, last]]
            if last.finish_reason == "cancelled":  # the first step gives two tokens, and may have reached the end
                assert last.text == "", "what is held back may still become a stop"
                answer.extend(TOKENS - len(answer.sequence.answer))
                shown += [chunk.text for chunk in answer]
            assert (answer.response().text, answer.response().finish_reason) == (plain.text, plain.finish_reason)
            assert "".join(shown) == plain.text


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("seed", range(20, 23))
def test_too_short_and_made_longer(model: LanguageModel, options: dict[str, Any], seed: int, stop: list[str]) -> None:
    options = options | {"seed": seed}
    plain = whole(model, options, stop)
    for cut in range(1, len(plain.tokens), 2):
        with forerun.stream(model, "hello", max_tokens=cut, stop=stop, **options) as answer:
            *chunks, last = answer
            alone = forerun.generate(model, "hello", max_tokens=cut, stop=stop, **options)
            assert "".join(chunk.text for chunk in [*chunks, last]) == alone.text == answer.response().text
            answer.extend(TOKENS - cut)
            chunks += answer
            assert (answer.response().text, answer.response().finish_reason) == (plain.text, plain.finish_reason)
            assert "".join(chunk.text for chunk in chunks) == plain.text  # the last one before was taken back


def test_an_interrupt_while_a_chunk_is_taken_counts_its_text_once(
    model: LanguageModel, options: dict[str, Any]
) -> None:
    plain = whole(model, options, [])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    class Impatient(list[str]):
        """Ctrl-C between counting the text of a chunk and taking the chunk."""

        def append(self, text: str) -> None:
            super().append(text)
            signal.raise_signal(signal.SIGINT)

    try:
        with forerun.stream(model, "hello", max_tokens=TOKENS, **options) as answer:
            for _ in range(5):
                next(answer)
            answer._text = Impatient(answer._text)
            with pytest.raises(KeyboardInterrupt):
                next(answer)
            answer._text = list(answer._text)
            response, text = answer.response(), AnswerText(model.tokenizer, [], [])
            assert response.tokens == plain.tokens[: len(response.tokens)]
            assert response.text == "".join(text.push(token)[0] for token in response.tokens)
            assert [chunk.token for chunk in answer][:-1] == plain.tokens[6:]
            assert answer.response().text == plain.text
    finally:
        signal.signal(signal.SIGINT, before)
