"""Chat templates for tests, in the manner of the families: what they show of tools, thinking, systems and roles."""

from __future__ import annotations

from typing import Any

from tiny import tiny_tokenizer

# ChatML with tools, calls and results, thinking that can be switched off, and systems anywhere.
QWEN = """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content and loop.last %}{{ '<think>\\n' + message.reasoning_content }}
{%- if content %}{{ '\\n</think>\\n\\n' }}{% endif %}{% endif %}
{{- content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}
{%- else %}{{ '<think>\\n' }}{% endif %}{% endif %}"""

# Roles alternate, a system message stands first only, call ids have nine letters, arguments are objects.
MISTRAL = """{{ bos_token }}{% if messages[0].role == 'system' %}
{{- '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}
{%- set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- set state = namespace(user=true) %}
{%- for message in rest %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != state.user %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set state.user = not state.user %}{% endif %}
{%- if message.role == 'user' %}[INST]{{ message.content }}[/INST]
{%- elif message.role == 'assistant' and message.tool_calls %}[TOOL_CALLS][
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- ', "id": "' + call.id + '"}' }}{% endfor %}]{{ eos_token }}
{%- elif message.role == 'assistant' %}{{ message.content + eos_token }}
{%- elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.tool_call_id }}:{{ message.content }}[/TOOL_RESULTS]
{%- else %}{{ raise_exception('only user, assistant and tool') }}{% endif %}
{%- endfor %}"""

# Contents are lists of parts, arguments are text, and the developer's role is known.
PARTS = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'developer' %}(developer){% endif %}
{% for part in message.content %}{{ part['text'] }}{% endfor %}
{% for call in message.tool_calls or [] %}{{ call.function.name + '(' + call.function.arguments + ')' }}{% endfor %}
<|im_end|>
{% endfor %}{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}<|im_start|>assistant
"""

# Nothing but users and assistants.
BARE = """{% for message in messages %}{% if message.role not in ('user', 'assistant') %}
{{- raise_exception('unknown role') }}{% endif %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


def tokenizer_with(template: str | None, *added: str) -> Any:
    """The tiny tokenizer with this template and these added tokens, which are not special."""
    from tokenizers import AddedToken

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    tokenizer.chat_template = template
    return tokenizer


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def with_a_call(call_id: str = "call_0123456789") -> list[dict[str, Any]]:
    """A conversation in which a tool was called."""
    call = {"id": call_id, "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Öslo"}}}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "reasoning_content": "I must look.", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": call_id, "name": "get_weather"},
    ]
