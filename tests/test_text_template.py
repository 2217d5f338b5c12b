"""Templates under limits: time, size, options of a request, and the sandbox."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from chat_templates import MISTRAL, QWEN, WEATHER, tokenizer_with, with_a_call

from forerun.errors import ForerunError
from forerun.text import template as template_module
from forerun.text.chat import encode_chat
from forerun.text.template import ChatTemplate, check_options

MESSAGES = [{"role": "user", "content": "x" * 3000}]


def error_of(source: str, seconds: float = 0.1, **values: Any) -> str:
    with pytest.raises(ForerunError) as failure:
        ChatTemplate(source, {}).render(MESSAGES, seconds=seconds, **values)
    message = str(failure.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}x{% endfor %}{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% set y = j %}{% endfor %}{% endfor %}",
        "{% macro f() %}{% for i in range(90000) %}{% endfor %}{% endmacro %}"
        "{% for i in range(90000) %}{{ f() }}{% endfor %}",
        "{% for i in range(90000) %}{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}"
        "{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for i in range(90000) %}{% for j in range(90000) %}"
        "{% set ns.n = ns.n + 1 %}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_takes_too_long_is_stopped_from_within(source: str) -> None:
    begun = time.monotonic()
    assert "too long" in error_of(source)
    assert time.monotonic() - begun < 3


def test_a_render_that_is_stopped_does_not_stop_the_next() -> None:
    template = ChatTemplate("{% for i in range(n) %}{{ messages[0].role }}{% endfor %}", {})
    with pytest.raises(ForerunError, match="too long"):
        template.render(MESSAGES, options={"n": 99_000}, seconds=0.0)
    assert template.render(MESSAGES, options={"n": 1}) == "user"


def test_renders_in_several_threads_have_clocks_of_their_own() -> None:
    template = ChatTemplate("{% for i in range(30000) %}{{ messages[0].role }}{% endfor %}", {})
    results: list[str] = []

    def render(seconds: float) -> None:
        try:
            results.append(template.render(MESSAGES, seconds=seconds)[:4])
        except ForerunError:
            results.append("late")

    threads = [threading.Thread(target=render, args=(seconds,)) for seconds in (0.0, 60.0, 0.0, 60.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["late", "late", "user", "user"]


def test_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "repeats" in error_of("{{ 'x' * 10000000000 }}")
    assert "repeats" in error_of("{{ 10000000000 * [1] }}")
    assert "too large" in error_of("{{ 10 ** 10000000 }}")
    assert ChatTemplate("{{ '-' * 3 }}{{ 2 ** 5 }}{{ 3 * 4 }}", {}).render(MESSAGES) == "---3212"
    monkeypatch.setattr(template_module, "LONGEST", 1000)
    assert "too much" in error_of("{{ messages[0].content }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ dict.__class__.mro() }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ '{0.__class__.__name__}'.format(1) }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    assert "chat template" in error_of(source)


def test_special_names_of_templates_are_there() -> None:
    source = "{% generation %}{{ {'a': 'ü<'} | tojson }}{% endgeneration %}{% for i in range(3) %}"
    source += "{% if i == 1 %}{% break %}{% endif %}{{ i }}{% endfor %}{{ strftime_now('%Y') | length }}{{ eos_token }}"
    assert ChatTemplate(source, {"eos_token": "</s>"}).render(MESSAGES) == '{"a": "ü<"}04</s>'


@pytest.mark.parametrize("template", [QWEN, MISTRAL])
def test_renders_equal_those_of_transformers(template: str) -> None:
    tokenizer = tokenizer_with(template)
    messages = [message | {"content": message["content"] or ""} for message in with_a_call("abcdefghi")]
    for tools in (None, [WEATHER]):
        expected = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        assert ChatTemplate(template, tokenizer.special_tokens_map).render(messages, tools=tools) == expected


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"tokenize": True}, "tokenize"),
        ({"messages": "x"}, "messages"),
        ({"tools": "x"}, "tools"),
        ({"chat_template": "x"}, "chat_template"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"return_tensors": "pt"}, "return_tensors"),
        ({"_private": 1}, "_private"),
        ({"bos_token": "x"}, "bos_token"),
        ({"raise_exception": "x"}, "raise_exception"),
        ({"enable_thinkin": True}, "it has: .*enable_thinking"),
        ({"enable_thinking": {"a": 1}}, "must be text"),
        ({"enable_thinking": [1]}, "must be text"),
        ({"enable_thinking": "x" * 1001}, "too long"),
        ({"enable_thinking": 10**100}, "too long"),
        ({f"o{i}": 1 for i in range(33)}, "33"),
    ],
)
def test_options_of_a_request_are_checked(options: dict[str, Any], part: str) -> None:
    tokenizer = tokenizer_with(QWEN)
    with pytest.raises(ForerunError, match=part):
        encode_chat(tokenizer, MESSAGES, template_options=options)


def test_options_that_a_template_reads_are_taken() -> None:
    template = ChatTemplate("{{ effort }}{{ limit }}{{ nothing is none }}", {})
    options = check_options({"effort": "high", "limit": 1.5, "nothing": None}, template)
    assert template.render(MESSAGES, options=options) == "high1.5True"


def test_control_tokens_in_options_are_text() -> None:
    tokenizer = tokenizer_with("{{ effort }}{{ messages[0].content }}")
    prompt = encode_chat(tokenizer, MESSAGES, template_options={"effort": "<|im_end|>"})
    assert tokenizer.eos_token_id not in prompt.ids
    assert prompt.text.startswith("<|im_end|>xxx")
