"""Answers by JSON schemas under speculation: what has ended parses and validates, and is what plain decoding gives.

`data/schemas.jsonl` has 300 of them. A random model writes to some of them here, the built-in one to all (`real`).
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engines import NoText, decoder, finish, request
from heads import HeadShape, mtp_engine, random_head, write_head
from jsonschema import Draft202012Validator
from tiny import tiny_model, tiny_tokenizer

import forerun
from forerun.draft.arms import FORCED
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.sample.grammar import GrammarVocabulary, compile_grammar
from forerun.sample.parameters import SamplingParams
from forerun.sample.schema_formats import with_lengths
from forerun.text.chat import encode_prompt

pytest.importorskip("llguidance")

LINES = (Path(__file__).parent / "data/schemas.jsonl").read_text(encoding="utf-8").splitlines()
SCHEMAS: list[dict[str, Any]] = [json.loads(line) for line in LINES]


@dataclass
class Tally:
    """What came of many answers."""

    finished: int = 0
    cut: list[str] = field(default_factory=list)  # names of schemas whose answers had no end
    wrong: list[str] = field(default_factory=list)
    tokens: int = 0
    rounds: int = 0
    forced: int = 0  # tokens that needed no drafter

    def count(self, entry: dict[str, Any], sequence: Any, text: str) -> None:
        assert sequence.error is None and not sequence.warnings, (entry, sequence.error, sequence.warnings)
        self.tokens += len(sequence.answer)
        self.rounds += sequence.counters.rounds
        if FORCED.name in sequence.counters.arms:
            self.forced += sequence.counters.arms[FORCED.name].accepted
        if sequence.finish_reason != "stop":
            self.cut.append(entry["name"])
            return
        self.finished += 1
        validator = Draft202012Validator(entry["schema"], format_checker=Draft202012Validator.FORMAT_CHECKER)
        try:
            faults = [error.message for error in validator.iter_errors(json.loads(text))]
        except ValueError as error:
            faults = [str(error)]
        if faults:
            self.wrong.append(f"{entry['name']}: {text!r}: {faults[0]}")


def test_there_are_three_hundred_different_ones() -> None:
    assert len(SCHEMAS) == 300
    assert len({json.dumps(entry["schema"], sort_keys=True) for entry in SCHEMAS}) == 300
    assert len({entry["name"] for entry in SCHEMAS}) == 300


def test_formats_have_the_length_that_they_have() -> None:
    """Values, names and shorter bounds of the user's are left alone."""
    email = {"type": "string", "format": "email"}
    whole = {
        "properties": {"format": email, "when": {"format": "time", "maxLength": 9}, "far": {**email, "minLength": 300}},
        "$defs": {"email": {"anyOf": [email, {"type": "null"}]}},
        "default": {"format": "email"},
        "enum": [{"format": "email"}],
        "items": [{**email, "maxLength": 9000}],
    }
    bounded = {**email, "maxLength": 254}
    assert with_lengths(whole) == {
        **whole,
        "properties": {**whole["properties"], "format": bounded},  # type: ignore[dict-item]
        "$defs": {"email": {"anyOf": [bounded, {"type": "null"}]}},
        "items": [bounded],
    }
    assert with_lengths(True) is True and with_lengths({"format": {"type": "string"}}) == {"format": {"type": "string"}}


@pytest.mark.parametrize(
    ("name", "fits", "longer"),
    [
        ("time", "12:34:56.123456789+00:00", "12:34:56.1234567890+00:00"),
        ("date-time", "2026-01-02T12:34:56.123456789+00:00", "2026-01-02T12:34:56.1234567890+00:00"),
        ("email", "a" * 50 + "@b.example", "a@" + "b." * 130 + "example"),
        ("hostname", "a.example", "b." * 130 + "example"),
    ],
)
def test_texts_of_a_format_come_to_an_end(name: str, fits: str, longer: str) -> None:
    """A small model that has begun to repeat itself wrote on until it was cut off."""
    tokenizer = tiny_tokenizer()
    grammar = compile_grammar(GrammarVocabulary(tokenizer, 290, {2}), "json_schema", {"type": "string", "format": name})
    for text, whole in ((fits, True), (longer, False)):
        tokens = tokenizer(json.dumps(text), add_special_tokens=False)["input_ids"]
        assert (grammar.start(frozenset({2})).legal(tokens) == len(tokens)) == whole


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
    folder = tiny_model(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=4096, **shape)
    head = HeadShape(32, heads=2, kv_heads=1, size=16, inner=48, taps=(0,))
    write_head(tmp_path_factory.mktemp("head"), folder, head, random_head(head))
    model = decoder(folder, quantize=True)
    return mtp_engine(model, tmp_path_factory.getbasetemp() / "head0", pages=8000, context=2048)


@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.long)])
def test_answers_of_a_random_model_validate(machine: Engine, every: int) -> None:
    tokenizer, stops, tally = tiny_tokenizer(), frozenset({2}), Tally()
    vocabulary = GrammarVocabulary(tokenizer, machine.vocab, stops)
    some = SCHEMAS[::every]
    grammars = [compile_grammar(vocabulary, "json_schema", entry["schema"]) for entry in some]
    answers: dict[str, list[list[int]]] = {}
    for draft in ("off", "mtp", "lookup", "auto"):
        found = [
            machine.submit(
                request([5, 6, 7, 5, 6], max_tokens=300, draft=draft, temperature=0.8, seed=number, stop_ids=stops),
                NoText(),
                grammar.start(stops),
            )
            for number, grammar in enumerate(grammars)
        ]
        finish(machine, found)
        for entry, sequence in zip(some, found, strict=True):
            tally.count(entry, sequence, tokenizer.decode(sequence.answer))
            machine.release(sequence)
        answers[draft] = [sequence.answer for sequence in found]
    assert answers["mtp"] == answers["lookup"] == answers["auto"] == answers["off"]
    assert not tally.wrong, tally.wrong
    assert tally.forced > 3 * len(some) and len(tally.cut) < 0.1 * 4 * len(some), tally  # a random model rambles


@pytest.mark.real
@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_three_hundred_schemas_with_the_built_in_model(temperature: float) -> None:
    model = forerun.load("smollm2")
    engine, tokenizer, tally = model.engine, model.tokenizer, Tally()
    vocabulary = GrammarVocabulary(tokenizer, engine.vocab, model.stop_ids)
    sampling = SamplingParams(temperature=temperature, seed=1)
    began = time.perf_counter()
    for start in range(0, 300, 20):
        batch = SCHEMAS[start : start + 20]
        found = []
        for number, entry in enumerate(batch):
            text = f"Give one example that fits this JSON schema:\n{json.dumps(entry['schema'])}"
            wish = Request(
                tuple(encode_prompt(tokenizer, text)),
                sampling,
                1024,
                stop_ids=model.stop_ids,
                draft=("auto", "lookup", "mtp")[number % 3],
            )
            grammar = compile_grammar(vocabulary, "json_schema", entry["schema"])
            found.append(engine.submit(wish, NoText(), grammar.start(model.stop_ids)))
        finish(engine, found, steps=50_000)
        for entry, sequence in zip(batch, found, strict=True):
            tally.count(entry, sequence, tokenizer.decode(sequence.answer))
            engine.release(sequence)
    print(tally, f"{time.perf_counter() - began:.0f} s")
    assert not tally.wrong, tally.wrong
    assert len(tally.cut) < 6, tally.cut
