"""Thinking through the server on a tiny engine: a budget ends it exactly there, and forms begin behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from engines import decoder
from local_engines import language_model
from serve_fakes import FakeEngine, app_for, call, live
from tiny import tiny_model, tiny_tokenizer

from forerun.serve.app import create_app
from forerun.serve.local_engine import LocalEngine
from forerun.serve.model_service import ModelService, loaded_model
from forerun.serve.settings import ServeSettings

ASK: Any = [{"role": "user", "content": "the cat and the dog and the cat and the dog"}]
CLOSING = "\n</think>\n\n"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    "{% endif %}"
)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    target = decoder(tiny_model(tmp_path_factory.mktemp("m"), "llama", num_hidden_layers=1), quantize=False)
    model = language_model(target, context=400)
    model.stop_ids = frozenset({0, 2})
    model.tokenizer = tiny_tokenizer()
    model.tokenizer.chat_template = TEMPLATE
    local = LocalEngine(ServeSettings())
    local.open(model)
    with live(
        create_app(ModelService("tiny", local, loaded=loaded_model(model, ServeSettings())), ServeSettings())
    ) as address:
        yield address
    asyncio.run(local.close())


def chat(address: str, **body: Any) -> dict[str, Any]:
    # The end of the answer and the mark's first letter are unlikely: the model thinks until it must stop.
    bias = {"0": -100, "2": -100}
    sent = {"messages": ASK, "max_tokens": 60, "logit_bias": bias, "logprobs": True, **body}
    reply = call(address, "/v1/chat/completions", sent)
    assert reply.status == 200, reply.text
    choice: dict[str, Any] = reply.json["choices"][0]
    return choice | {"usage": reply.json["usage"]}


@pytest.mark.parametrize("budget", [0, 1, 7, 20])
@pytest.mark.parametrize("draft", ["off", "lookup"])
def test_a_budget_ends_thinking_exactly_there(address: str, budget: int, draft: str) -> None:
    for fields in ({"thinking_budget": budget}, {"thinking_token_budget": budget}):
        choice = chat(address, temperature=0, speculative=draft, **fields)
        tokens = [bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]]
        text = b"".join(tokens).decode(errors="replace")
        before = b"".join(tokens[:budget]).decode(errors="replace")
        assert text.startswith(before + CLOSING), (budget, text)
        assert choice["message"].get("reasoning_content", "") == before.strip()
        assert choice["message"]["content"] == text[len(before + CLOSING) :].lstrip()
        assert len(tokens) == 60


def test_drafts_change_nothing_around_the_border(address: str) -> None:
    plain = chat(address, temperature=0.8, seed=5, thinking_budget=9, speculative="off")
    assert chat(address, temperature=0.8, seed=5, thinking_budget=9, speculative="lookup") == plain
    assert chat(address, temperature=0.8, seed=5, thinking_budget=9) == plain


def test_the_form_begins_behind_the_thinking(address: str) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}
    for seed in range(3):
        more = {"seed": seed, "logit_bias": {}, "response_format": form}
        choice = chat(address, thinking_budget=10, **more)
        assert json.loads(choice["message"]["content"]) in ("yes", "no")
        quiet = chat(address, reasoning_effort="none", **more)
        assert json.loads(quiet["message"]["content"]) in ("yes", "no")
        assert "reasoning_content" not in quiet["message"]


def test_effort_is_a_budget(address: str) -> None:
    choice = chat(address, reasoning_effort="minimal", max_tokens=300, temperature=0)
    assert choice["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 256 + len(CLOSING)
    assert choice["message"]["content"]


@pytest.mark.parametrize(("said", "thinks"), [("auto", True), ("off", False), ("low", True)])
def test_the_servers_word_on_thinking_holds_where_a_request_has_none(said: str, thinks: bool) -> None:
    engine = FakeEngine(say=lambda work: "x")
    engine.tokenizer.chat_template = TEMPLATE
    with live(app_for(engine, ServeSettings(reasoning=said))) as address:
        for path, body in {"/v1/chat/completions": {}, "/v1/messages": {"model": "tiny", "max_tokens": 9}}.items():
            assert call(address, path, {"messages": ASK, **body}).status == 200
            prompt = engine.tokenizer.decode(engine.started[-1].request.prompt)
            assert prompt.endswith("<think>\n") == thinks
            assert (engine.started[-1].constraint is not None) == (said == "low"), "a level has a budget"
        shown = call(address, "/apply-template", {"messages": ASK}).json["prompt"]
        assert shown.endswith("<think>\n") == thinks
        call(address, "/v1/chat/completions", {"messages": ASK, "reasoning_effort": "none"})
        assert not engine.tokenizer.decode(engine.started[-1].request.prompt).endswith("<think>\n")
        call(address, "/v1/chat/completions", {"messages": ASK, "reasoning_effort": "high"})
        assert engine.tokenizer.decode(engine.started[-1].request.prompt).endswith("<think>\n")
