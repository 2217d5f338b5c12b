"""Prompts into tokens: chat templates, raw text, messages and ready-made ids.

Chat templates are rendered in jinja's immutable sandbox under limits (`template`), and an ordinary prompt is tokenised
exactly as transformers' `apply_chat_template` would. Control tokens are for the template to write: text of users that
contains one stays text (`guarded`). With `raw` the whole text is the caller's, and control tokens in it count.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.errors import ForerunError
from forerun.text.content import PLURALS, media_in, text_of
from forerun.text.guarded import ControlTokenGuard, check_unicode, control_texts, map_strings, strings_in
from forerun.text.habits import REASONING_NAMES, Habits, Messages, adapt, habits_of
from forerun.text.messages import Message, check_messages
from forerun.text.template import SECONDS, ChatTemplate, check_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# How thinking begins and ends, in the families that think.
THINK_MARKS = {
    "think": ("<think>", "</think>"),
    "gemma4": ("<|channel>thought", "<channel|>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
_CONTINUE = "\uf8ff\uf8fe\uf8ff"  # where the last message ends, so that nothing after it stays


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation ready for the model."""

    ids: list[int]
    text: str  # the same as text, what users typed as they typed it
    thinking_open: bool  # the prompt ends inside a thinking block, so the answer begins there


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_options: Mapping[str, Any] | None = None,
    continue_last: bool = False,
    new_turn: bool = True,
    seconds: float = SECONDS,
) -> ChatPrompt:
    """Messages and tools through the model's template, ready for the assistant's turn.

    Messages as in `ChatJob.messages`: `content` is text, nothing or a list of text parts and places of media, for each
    of which the template writes a placeholder; arguments of calls are objects. Tools are OpenAI's function objects.
    Without `new_turn` the assistant's turn is not begun. With `continue_last` the last message is the assistant's own
    beginning and the answer goes on after it. Safe in any thread; `seconds` bounds the rendering as far as `template`
    says.
    """
    check_messages(messages)
    template = chat_template(tokenizer, with_tools=bool(tools))
    options = check_options(template_options or {}, template)
    if continue_last and messages[-1]["role"] != "assistant":
        raise ForerunError("only a message of the assistant's can be continued; the last one is not")
    given = [*strings_in(list(messages)), *strings_in(list(tools or ())), *strings_in(options)]
    check_unicode(given)
    habits = habits_of(template.source, tokenizer.special_tokens_map)
    _check_places(messages, habits)
    adapted, listed = adapt(messages, tools, habits)
    given += [*strings_in(adapted), *strings_in(listed)]  # parts of a text may have become one
    guard = ControlTokenGuard(control_texts(tokenizer, template.source), given, template.source)
    masked = [_masked(message, guard) for message in adapted]
    values = {name: map_strings(value, guard.mask) for name, value in options.items()}
    rendered = _render(template, masked, map_strings(listed, guard.mask), values, continue_last, new_turn, seconds)
    ids = guard.encode(tokenizer, rendered)
    if not ids:
        raise ForerunError("the prompt gives no tokens with this tokenizer; give some text")
    last = messages[-1]
    beginning = len(text_of(last.get("content")) + (last.get("reasoning_content") or "")) if continue_last else 0
    return ChatPrompt(ids, guard.unmask(rendered), _thinking_open(rendered, beginning))


def chat_template(tokenizer: PreTrainedTokenizerBase, *, with_tools: bool = False) -> ChatTemplate:
    """The model's template; some models have one of their own for tools."""
    if not tokenizer.chat_template:
        raise ForerunError("this model has no chat template, so it cannot take messages; give the prompt as plain text")
    try:
        source = tokenizer.get_chat_template(None, [{}] if with_tools else None)
    except ValueError as error:
        raise ForerunError("this model has several chat templates, but no default one") from error
    return ChatTemplate(str(source), tokenizer.special_tokens_map)


def _check_places(messages: Sequence[Message], habits: Habits) -> None:
    for kind in (kind for message in messages for kind in media_in(message.get("content"))):
        if kind not in habits.media:
            raise ForerunError(f"the chat template of this model has no place for {PLURALS[kind]}")


def _masked(message: dict[str, Any], guard: ControlTokenGuard) -> dict[str, Any]:
    masked: dict[str, Any] = {key: map_strings(value, guard.mask) for key, value in message.items() if key != "role"}
    if message["role"] == "assistant":
        # Its own thinking may still be in its text; templates look for these marks to leave it out.
        allowed = THINK_MARKS["think"]
        masked["content"] = map_strings(message["content"], lambda text: guard.mask(text, allow=allowed))
    return {"role": message["role"], **masked}


def _render(
    template: ChatTemplate,
    messages: Messages,
    tools: Any,
    options: Mapping[str, Any],
    continue_last: bool,
    new_turn: bool,
    seconds: float,
) -> str:
    if not continue_last:
        return template.render(messages, tools=tools, options=options, new_turn=new_turn, seconds=seconds)
    last = dict(messages[-1])
    reasoning = not text_of(last["content"]) and bool(last.get("reasoning_content"))
    if reasoning:
        last |= {name: last[name] + _CONTINUE for name in REASONING_NAMES}
    elif isinstance(last["content"], list):
        last["content"] = [*last["content"][:-1], {"type": "text", "text": last["content"][-1]["text"] + _CONTINUE}]
    else:
        last["content"] += _CONTINUE
    rendered = template.render([*messages[:-1], last], tools=tools, options=options, new_turn=False, seconds=seconds)
    end = rendered.rfind(_CONTINUE)
    if end < 0:
        raise ForerunError("the model's chat template leaves out the last message, so it cannot be continued")
    return rendered[:end]


def _thinking_open(rendered: str, beginning: int) -> bool:
    """Does the prompt end inside thinking? Only what the assistant's turn itself says counts."""
    tail = rendered[-(beginning + 64) :] if beginning else rendered.rstrip()[-32:]
    for start, end in THINK_MARKS.values():
        opened = tail.rfind(start)
        if opened >= 0 and tail.rfind(end) < opened and (beginning or tail.endswith(start)):
            return True
    return False


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[Message] | Sequence[int],
    system: str | None = None,
    raw: bool = False,
) -> list[int]:
    """The prompt's token ids.

    - text: a user message (after `system`, when given) through the chat template, ready for the assistant's turn;
      without a chat template in the model, or with `raw`, the text alone, with the tokenizer's own first token (BOS)
      unless it begins with that;
    - messages, `[{"role": "user", "content": "..."}]`: through the chat template, `system` in front; a content may be a
      list of text parts and places of media;
    - token ids: used as they are.
    """
    if isinstance(prompt, str):
        if raw or not tokenizer.chat_template:
            return _encode_raw(tokenizer, prompt, system, raw)
        if not prompt.strip():
            raise ForerunError("the prompt is empty; give some text")
        return encode_chat(tokenizer, _with_system([{"role": "user", "content": prompt}], system)).ids
    items = list(prompt)
    if not items:
        raise ForerunError("the prompt is empty; give some text, messages or token ids")
    if all(isinstance(item, Mapping) for item in items):
        if raw:
            raise ForerunError("messages need the chat template; give plain text to use raw")
        return encode_chat(tokenizer, _with_system(_checked_messages(items), system)).ids
    if system is not None:
        raise ForerunError("a system prompt cannot be added to token ids; put its tokens into the prompt")
    return _checked_ids(items, len(tokenizer))


def _encode_raw(tokenizer: PreTrainedTokenizerBase, text: str, system: str | None, raw: bool) -> list[int]:
    if system is not None:
        reason = "raw prompts use no chat template" if raw else "this model has no chat template"
        raise ForerunError(f"{reason}, so a system prompt has no place; put it into the prompt")
    if not text:
        raise ForerunError("the prompt is empty; give some text")
    check_unicode([text])
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    if not ids:
        raise ForerunError("the prompt gives no tokens with this tokenizer; give some text")
    if ids[:2] == [tokenizer.bos_token_id] * 2:  # the text may have begun with BOS itself: one is enough
        own: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids[1:] if len(own) < len(ids) else ids
    return ids


def _with_system(messages: list[Message], system: str | None) -> list[Message]:
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        raise ForerunError("the messages begin with a system message already; leave out the system option")
    return [{"role": "system", "content": system}, *messages]


def _checked_messages(messages: Sequence[Any]) -> list[Message]:
    for number, message in enumerate(messages, start=1):
        if set(message) != {"role", "content"}:
            raise ForerunError(f"message {number} must have exactly the keys 'role' and 'content'")
        if message["content"] is None:
            raise ForerunError(f"message {number} must have text as its content")
    check_messages(messages)
    if not any(text_of(message["content"]).strip() or media_in(message["content"]) for message in messages):
        raise ForerunError("the prompt is empty; give at least one message with text")
    return list(messages)


def _checked_ids(ids: Sequence[Any], vocabulary: int) -> list[int]:
    """Plain ints of whatever counts as one, numpy's among them."""
    try:
        tokens = [operator.index(token) for token in ids if not isinstance(token, bool)]
    except TypeError:
        tokens = []
    if len(tokens) != len(ids):
        raise ForerunError("the prompt must be text, a list of messages or a list of token ids (whole numbers)")
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise ForerunError(f"the prompt has token id {token}, but the tokenizer's ids are 0 to {vocabulary - 1}")
    return tokens
