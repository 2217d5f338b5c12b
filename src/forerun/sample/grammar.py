"""Grammars of llguidance as constraints: JSON schemas, regular expressions, choices, Lark grammars.

`compile_grammar` may run on any thread; a `GrammarConstraint` belongs to one answer. The matcher of an answer only
ever consumes emitted tokens, each checked first, since its error state is final; drafts are followed on copies of it,
which cost a microsecond or two.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.errors import ForerunError
from forerun.sample.constraint import ConstraintStuck
from forerun.sample.grammar_text import DEFAULT_LIMITS, GrammarLimits, OutputKind, check_output
from forerun.sample.masks import Masks, packed, words_of
from forerun.sample.schema_formats import with_lengths

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from transformers import PreTrainedTokenizerFast

# One way to put spaces, the one models like best: an answer cannot go on in white space for ever, and keys are forced.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
MANY_CHOICES = 1000


class GrammarVocabulary:
    """The tokens of a model as llguidance sees them. Make one for each loaded model: it takes up to a second."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocab: int, stop_ids: Iterable[int] = ()) -> None:
        """`vocab`: of the engine. `stop_ids`: of the model; one stands in where the tokenizer names no end."""
        from llguidance import LLTokenizer

        end = tokenizer.eos_token_id if isinstance(tokenizer.eos_token_id, int) else min(stop_ids, default=0)
        self.vocab = vocab
        backend = copy(tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        self.tokens = LLTokenizer(backend.to_str(), n_vocab=max(vocab, len(tokenizer)), eos_token=end)
        self.ends = frozenset(self.tokens.eos_tokens)


class Grammar:
    """A compiled grammar; `start` as many answers with it as you like."""

    def __init__(self, vocabulary: GrammarVocabulary, matcher: LLMatcher, source: str) -> None:
        """`source`: in llguidance's own form."""
        self._vocabulary, self._matcher, self._source = vocabulary, matcher, source

    def start(self, stop_ids: frozenset[int]) -> GrammarConstraint:
        """The constraint of one answer, which one of these tokens ends where the grammar may end."""
        if not any(0 <= token < self._vocabulary.vocab for token in stop_ids):
            raise ForerunError("a grammar needs a token that ends the answer: leave ignore_eos out")
        return GrammarConstraint(self._matcher.deep_copy(), self._vocabulary, stop_ids, self._source)


def compile_grammar(
    vocabulary: GrammarVocabulary, kind: OutputKind, value: Any = None, limits: GrammarLimits = DEFAULT_LIMITS
) -> Grammar:
    """One that cannot be compiled is a ForerunError of one line."""
    check_output(kind, value, limits)
    try:
        source = _source(kind, value)
        matcher = _matcher(vocabulary, source)
    except ValueError as error:
        raise ForerunError(f"{WORDS[kind]} cannot be used: {_line(str(error))}") from None
    first = matcher.deep_copy()
    if not first.is_error():
        first.compute_bitmask()  # some can be read and allow no beginning at all: a rule that is only itself
    if first.is_error():
        line = _line(first.get_error()).replace("NoExtensionBias", "nothing can match it")  # llguidance's word for that
        raise ForerunError(f"{WORDS[kind]} cannot be used: {line}")
    return Grammar(vocabulary, matcher, source)


def _matcher(vocabulary: GrammarVocabulary, source: str) -> LLMatcher:
    """Its own limits on the size of grammars and the work for a mask are the defaults; errors show no parser state."""
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(vocabulary.tokens, source, log_level=0, limits=LLParserLimits(verbose_errors=False))


def _started(vocabulary: GrammarVocabulary, source: str, stop_ids: frozenset[int]) -> GrammarConstraint:
    return Grammar(vocabulary, _matcher(vocabulary, source), source).start(stop_ids)


WORDS = {
    "json_object": "the JSON grammar",
    "json_schema": "the JSON schema",
    "regex": "the regular expression",
    "choice": "the list of choices",
    "grammar": "the grammar",
}


def _source(kind: OutputKind, value: Any) -> str:
    """In llguidance's own form."""
    from llguidance import LLMatcher

    if kind in ("json_object", "json_schema"):
        schema = {"type": "object"} if kind == "json_object" else value
        read = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps({} if read is True else with_lengths(read))
        return str(LLMatcher.grammar_from_json_schema(text, overrides=JSON_STYLE))
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(value))
    if kind == "choice":
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in value)
        # Of alternatives in a rule llguidance keeps track of two thousand; those in a terminal become an automaton.
        return f"start: {choices}" if len(value) <= MANY_CHOICES else f"start: CHOICE\nCHOICE: {choices}"
    return str(LLMatcher.grammar_from_lark(value))


def _line(text: str) -> str:
    """The first line of what went wrong, not too long."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
    return line if len(line) <= 300 else f"{line[:300]}…"


class GrammarConstraint:
    """A `Constraint`: stop tokens are allowed exactly where the grammar may end, and alone where it is complete."""

    def __init__(
        self, matcher: LLMatcher, vocabulary: GrammarVocabulary, stop_ids: frozenset[int], source: str
    ) -> None:
        self._matcher, self._stop_ids, self._vocab = matcher, stop_ids, vocabulary.vocab
        self._vocabulary, self._source = vocabulary, source
        self._ends = stop_ids | vocabulary.ends
        self._row_words = words_of(vocabulary.tokens.vocab_size)
        self._no_ends = ~packed(self._ends, vocabulary.tokens.vocab_size)
        self._stops = packed(stop_ids, vocabulary.tokens.vocab_size)
        usual = vocabulary.ends & stop_ids
        self._usual_stop = min(usual or (token for token in stop_ids if 0 <= token < self._vocab))
        self._forced: list[int] | None = None  # since the last commit

    def legal(self, drafts: Sequence[int]) -> int:
        """Of stop tokens only the first can be, where the grammar may end; ids beyond the vocabulary never are."""
        drafts = drafts[: next((place for place, token in enumerate(drafts) if token >= self._vocab), None)]
        end = next((place for place, token in enumerate(drafts) if token in self._ends), len(drafts))
        count = int(self._matcher.validate_tokens(list(drafts[:end])))
        self._check(self._matcher)
        if count == end < len(drafts) and drafts[end] in self._stop_ids:
            count += self._after(drafts[:end]).is_accepting()
        return count

    def masks(self, drafts: Sequence[int]) -> Masks:
        """A row behind a stop token is never used: it rules nothing out."""
        rows = np.full((len(drafts) + 1, self._row_words), -1, dtype=np.int32)
        matcher = self._matcher.deep_copy() if drafts else self._matcher
        for place in range(len(drafts) + 1):
            if place and drafts[place - 1] in self._stop_ids:
                break
            if place:
                matcher.consume_token(drafts[place - 1])
            row = rows[place]
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            row &= self._no_ends
            if matcher.is_accepting():
                row |= self._stops
        self._check(matcher)
        return rows[:, : words_of(self._vocab)]

    def forced(self, most: int) -> list[int]:
        """The end of the answer too, where the grammar is complete."""
        if self._forced is None:
            tokens: list[int] = self._matcher.compute_ff_tokens()
            self._check(self._matcher)
            if self._after(tokens).is_stopped():
                tokens.append(self._usual_stop)
            self._forced = tokens
        return self._forced[:most]

    def commit(self, token: int) -> None:
        """Checked first: a matcher that was given a wrong token is lost."""
        if self._matcher.validate_tokens([token]) != 1 or not self._matcher.consume_token(token):
            self._check(self._matcher)
            raise ForerunError(f"token {token} breaks the grammar of the answer")
        self._forced = None

    def __reduce__(self) -> tuple[Any, ...]:
        """As it was before the first token: an answer may be made in another process, which has its own vocabulary."""
        return _started, (self._vocabulary, self._source, self._stop_ids)

    def _after(self, tokens: Sequence[int]) -> LLMatcher:
        """A matcher that has consumed these too."""
        matcher = self._matcher.deep_copy()
        matcher.consume_tokens(list(tokens))
        self._check(matcher)
        return matcher

    def _check(self, matcher: LLMatcher) -> None:
        """One in error allows the end of the answer: it must never be asked."""
        if matcher.is_error():
            line = _line(matcher.get_error())
            raise ConstraintStuck(f"the grammar of the answer cannot go on, simplify it: {line}")
