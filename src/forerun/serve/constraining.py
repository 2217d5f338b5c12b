"""What may come next in an answer: its form, tools that must be called, how long it may think, a least length."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.sample.building import build_constraint
from forerun.sample.constraint import Constraint
from forerun.sample.grammar import Grammar, compile_grammar
from forerun.sample.grammar_text import GrammarLimits
from forerun.serve.chat_job import ChatJob, GenerationWish, OutputFormat
from forerun.serve.generation import stop_ids_of
from forerun.serve.model_service import LoadedModel

# What a model that thinks in <think> writes around its end: Qwen's own habit, and what others take as well.
CLOSING = {"think": "\n</think>\n\n"}
GAP = {"think": "\n\n"}


def needs_constraint(job: ChatJob) -> bool:
    """Most answers are free."""
    return job.wish.output is not None or job.wish.min_tokens > 0 or job.thinking.budget is not None


def output_grammar(model: LoadedModel, output: OutputFormat | None, limits: GrammarLimits) -> Grammar | None:
    """None: any text. It takes up to some hundred milliseconds: not for the event loop."""
    if output is None:
        return None
    return compile_grammar(model.grammar_vocabulary(), output.kind, output.value, limits)


def text_constraints(model: LoadedModel, wish: GenerationWish, grammar: Grammar | None) -> Sequence[Constraint | None]:
    """For each choice of a text completion."""
    stop_ids = stop_ids_of(model, wish)
    return [build_constraint(model.vocab, stop_ids, grammar=grammar, min_tokens=wish.min_tokens) for _ in range(wish.n)]


def chat_constraints(
    model: LoadedModel, job: ChatJob, grammar: Grammar | None, thinking_open: bool
) -> Sequence[Constraint | None]:
    """For each choice of a chat. A grammar begins behind the thinking."""
    form, wish = model.format, job.wish
    if form.reasoning == "none":
        return text_constraints(model, wish, grammar)
    assert form.think_start is not None
    assert form.think_end is not None
    may_start = not thinking_open and job.thinking.enabled is not False
    return [
        build_constraint(
            model.vocab,
            stop_ids_of(model, wish),
            grammar=grammar,
            thinking_open=thinking_open,
            think_start_ids=model.ids_of(form.think_start) if may_start else (),
            think_end_ids=model.ids_of(form.think_end),
            closing_ids=model.ids_of(CLOSING.get(form.reasoning, form.think_end)),
            gap_ids=model.ids_of(GAP.get(form.reasoning, "")),
            budget=job.thinking.budget,
            min_tokens=wish.min_tokens,
        )
        for _ in range(wish.n)
    ]
