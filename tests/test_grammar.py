"""Grammars against an oracle that asks a fresh matcher about every token of the vocabulary; limits; end tokens."""

from __future__ import annotations

import json
import threading
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import tiny_tokenizer

from forerun.errors import ForerunError
from forerun.sample.grammar import GrammarConstraint, GrammarVocabulary, compile_grammar
from forerun.sample.grammar_text import GrammarLimits
from forerun.sample.masks import flags_of

llguidance = pytest.importorskip("llguidance")

VOCAB, STOPS = 290, frozenset({2, 0})
PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["theatre", "thing", "x\"y"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-c]{1,3}$"}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}  # fmt: skip
FORMS: dict[str, tuple[str, Any]] = {
    "schema": ("json_schema", PERSON),
    "object": ("json_object", None),
    "regex": ("regex", r"(the|thing)+[0-9]{2,4}(\.[0-9]+)?"),
    "choice": ("choice", ["the end", "then", "théâtre", 'a "quote"\n']),
    "grammar": ("grammar", 'start: item ("," item)*\nitem: /[a-d]+/ | "(" start ")"'),
}


@lru_cache
def tokenizer() -> Any:
    return tiny_tokenizer()


@lru_cache
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(tokenizer(), VOCAB, STOPS)


@lru_cache
def compiled(form: str) -> Any:
    kind, value = FORMS[form]
    return compile_grammar(vocabulary(), kind, value)  # type: ignore[arg-type]


def encode(text: str) -> list[int]:
    return list(tokenizer()(text, add_special_tokens=False)["input_ids"])


def oracle(form: str, answer: list[int]) -> set[int]:
    """Every token that may follow, by trying each on a matcher that has seen nothing else."""
    kind, value = FORMS[form]
    fresh: GrammarConstraint = compile_grammar(vocabulary(), kind, value).start(STOPS)  # type: ignore[arg-type]
    matcher = fresh._matcher
    assert matcher.consume_tokens(answer)
    allowed = {token for token in range(VOCAB) if token not in STOPS and matcher.validate_tokens([token]) == 1}
    return allowed | (set(STOPS) if matcher.is_accepting() else set())


def after(form: str, answer: list[int]) -> GrammarConstraint:
    """One that was never asked about drafts."""
    constraint: GrammarConstraint = compiled(form).start(STOPS)
    for token in answer:
        constraint.commit(token)
    return constraint


def allowed(words: Any) -> set[int]:
    return set(flags_of(words, VOCAB).nonzero()[0].tolist())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(form=st.sampled_from(sorted(FORMS)), dice=st.randoms(use_true_random=False), data=st.data())
def test_laws(form: str, dice: Any, data: st.DataObject) -> None:
    """`masks` and `legal` say what the oracle says, change nothing, and `commit` moves on by one token."""
    constraint = compiled(form).start(STOPS)
    answer: list[int] = []
    for _ in range(data.draw(st.integers(0, 12))):
        choices = oracle(form, answer) - STOPS
        if not choices:
            break
        answer.append(dice.choice(sorted(choices)))
        constraint.commit(answer[-1])
    drafts: list[int] = []
    for _ in range(data.draw(st.integers(0, 5))):  # mostly legal ones, now and then any token
        choices = oracle(form, [*answer, *drafts])
        drafts.append(dice.choice(sorted(choices)) if dice.random() < 0.85 else dice.randrange(VOCAB))
        if drafts[-1] not in choices or drafts[-1] in STOPS:
            break
    expected = 0
    while expected < len(drafts) and not STOPS & set(drafts[:expected]):
        if drafts[expected] not in oracle(form, [*answer, *drafts[:expected]]):
            break
        expected += 1
    for _ in range(2):  # nothing is changed by asking
        assert constraint.legal([*drafts, 5, 2]) >= expected and constraint.legal(drafts) == expected
        legal = drafts[:expected]
        rows = constraint.masks(legal)
        assert rows.shape == (len(legal) + 1, 10) and rows.dtype.name == "int32"
        reached = len(rows) - bool(STOPS & set(legal))  # the row behind a stop token is nobody's
        for place in range(reached):
            before = [*answer, *legal[:place]]
            found, may, plain = allowed(rows[place]), oracle(form, before), after(form, before)
            assert found == allowed(plain.masks([])[0]), "plain decoding has the same choice"
            # Where one text alone may follow, masks may leave but one way to cut it into tokens.
            assert found == may or found == set(plain.forced(1)) < may
        forced = constraint.forced(8)
        assert constraint.legal(forced) == len(forced) <= 8


@pytest.mark.parametrize("form", sorted(FORMS))
def test_a_complete_text_can_only_end(form: str) -> None:
    texts = {
        "schema": '{"name": "thing", "age": 12}',
        "object": '{"a": [1, {"b": null}]}',
        "regex": "thing1234.5",
        "choice": "théâtre",
        "grammar": "(a,b)",
    }
    constraint = compiled(form).start(STOPS)
    tokens = encode(texts[form])
    assert constraint.legal([*tokens, 2, 2]) == len(tokens) + 1
    for token in tokens:
        constraint.commit(token)
    may_go_on = form in ("regex", "grammar")
    assert allowed(constraint.masks([])[0]) >= STOPS
    assert (allowed(constraint.masks([])[0]) == STOPS) is not may_go_on
    assert constraint.forced(4) == ([] if may_go_on else [2])


def test_stop_tokens_are_those_of_the_request() -> None:
    """Not those that the tokenizer has: one that the request leaves out is no text either."""
    constraint = compiled("choice").start(frozenset({3}))
    for token in encode("then"):
        constraint.commit(token)
    assert allowed(constraint.masks([])[0]) == {3} and constraint.forced(2) == [3]
    assert (constraint.legal([3]), constraint.legal([2]), constraint.legal([0])) == (1, 0, 0)
    with pytest.raises(ForerunError, match="ends the answer"):
        compiled("choice").start(frozenset())


def test_forced_text_is_cut_as_the_tokenizer_cuts_it() -> None:
    constraint = compiled("schema").start(STOPS)
    tokens = encode('{"name": "th')
    assert constraint.forced(40) == tokens[: len(constraint.forced(40))] and len(constraint.forced(40)) > 6
    assert constraint.forced(3) == tokens[:3]


def test_forced_tokens_that_the_model_does_not_have_are_never_drafts() -> None:
    """A tokenizer may have more of them than the model has rows: a pass over one would be lost."""
    few = GrammarVocabulary(tokenizer(), 262, STOPS)  # single bytes and two merges
    constraint = compile_grammar(few, "choice", ["in the end"]).start(STOPS)
    drafts = constraint.forced(20)
    assert max(drafts) >= few.vocab, "else this tests nothing"
    cut = constraint.legal(drafts)
    assert all(token < few.vocab for token in drafts[:cut])
    assert drafts[cut] >= few.vocab


def test_answers_of_one_grammar_do_not_meet() -> None:
    first, second = compiled("choice").start(STOPS), compiled("choice").start(STOPS)
    for token in encode("the"):
        first.commit(token)
    assert allowed(second.masks([])[0]) == oracle("choice", [])


def test_a_token_that_breaks_the_grammar_is_an_error_and_the_matcher_survives_it() -> None:
    constraint = compiled("choice").start(STOPS)
    with pytest.raises(ForerunError, match="breaks the grammar"):
        constraint.commit(encode("z")[0])
    assert allowed(constraint.masks([])[0]) == oracle("choice", [])


def test_a_vocabulary_larger_or_smaller_than_the_tokenizers() -> None:
    """A model may have more rows than its tokenizer has tokens, or fewer."""
    for vocab in (300, 281):
        grammar = compile_grammar(GrammarVocabulary(tokenizer(), vocab), "json_object")
        rows = grammar.start(frozenset({2})).masks([])
        assert rows.shape == (1, -(-vocab // 32)) and flags_of(rows[0], vocab).nonzero()[0].tolist() == encode("{")


BAD: list[tuple[str, Any, str]] = [
    ("json_schema", {"type": "strin"}, "the JSON schema cannot be used: Invalid type"),
    ("json_schema", {"not": {"type": "null"}}, "Unimplemented keys"),
    ("json_schema", {"$ref": "http://example.com/schema"}, "cannot be used"),
    ("json_schema", {"type": "string", "pattern": "("}, "cannot be used"),
    ("json_schema", {"anyOf": []}, "cannot be used"),
    ("json_schema", False, "cannot be used"),
    ("json_schema", [1], "must be an object or a boolean"),
    ("json_schema", "{", "is not JSON"),
    ("json_schema", "[" * 5000, "is not JSON"),
    ("json_schema", {"enum": [{1, 2}]}, "is not JSON"),
    ("json_schema", {"description": "x" * 70000}, "at most 65536"),
    ("regex", "(", "the regular expression cannot be used"),
    ("regex", "(" * 20000, "the regular expression cannot be used"),
    ("regex", "", "not empty"),
    ("regex", 5, "must be a text"),
    ("regex", "x" * 70000, "at most 65536"),
    ("choice", [], "at least one"),
    ("choice", ["a", ""], "none of them empty"),
    ("choice", "abc", "a list of texts"),
    ("choice", ["a"] * 5000, "at most 4096"),
    ("grammar", "start: foo", 'unknown name: "foo"'),
    ("grammar", "start: " + "(" * 9000 + '"a"' + ")" * 9000, "too deeply nested"),
]


@pytest.mark.parametrize(("kind", "value", "message"), BAD, ids=[f"{n}" for n in range(len(BAD))])
def test_what_cannot_be_used_is_refused_in_one_line(kind: Any, value: Any, message: str) -> None:
    with pytest.raises(ForerunError, match=message) as caught:
        compile_grammar(vocabulary(), kind, value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_depth_is_limited_before_anything_recurses() -> None:
    schema: Any = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(ForerunError, match="more than 64 deep"):
        compile_grammar(vocabulary(), "json_schema", schema)
    compile_grammar(vocabulary(), "json_schema", {"items": {"items": {}}}, GrammarLimits(depth=2))
    with pytest.raises(ForerunError, match="more than 1 deep"):
        compile_grammar(vocabulary(), "json_schema", {"items": {"items": {}}}, GrammarLimits(depth=1))


def test_too_much_work_for_a_mask_is_an_error_and_no_end_of_the_answer() -> None:
    """llguidance's limit on the work for one token; a matcher in error would allow the end."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(step_lexer_fuel=5)
    source = LLMatcher.grammar_from_regex(r"([a-z]+[0-9]*){3,50}(x|y|zz)+")
    matcher = LLMatcher(vocabulary().tokens, source, log_level=0, limits=limits)
    constraint = GrammarConstraint(matcher, vocabulary(), STOPS, "")
    with pytest.raises(ForerunError, match="cannot go on"):
        for token in encode("abc1def2ghi3x"):
            constraint.masks([])
            constraint.commit(token)


def test_compiling_on_other_threads() -> None:
    found: list[int] = []

    def work(number: int) -> None:
        schema = {"type": "object", "properties": {f"key{number}": {"const": number}}, "required": [f"key{number}"]}
        constraint = compile_grammar(vocabulary(), "json_schema", schema).start(STOPS)
        found.append(constraint.legal([*encode(json.dumps({f"key{number}": number})), 2]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and min(found) > 5
