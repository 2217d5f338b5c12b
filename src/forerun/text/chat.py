"""Prompts into tokens: chat templates, raw text, messages and ready-made ids.

Chat templates are rendered by transformers, in jinja's immutable sandbox, and an ordinary prompt is tokenised exactly
as `apply_chat_template` would. Control tokens are for the template to write: a message that contains the text of one
(`<|im_end|>` ...) gets that text spelled out in ordinary tokens, so nobody can end a turn by typing it. With `raw` the
whole text is the caller's, and control tokens in it count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forerun.errors import ForerunError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]
ROLES = ("system", "user", "assistant", "tool", "developer")
# Added tokens spelled like this steer the model even where the tokenizer does not call them special.
_LOOKS_LIKE_CONTROL = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)
_PRIVATE_USE = range(0xE000, 0xF900)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[Message] | Sequence[int],
    system: str | None = None,
    raw: bool = False,
) -> list[int]:
    """The prompt's token ids.

    - text: a user message (after `system`, when given) through the chat template, ready for the assistant's turn;
      without a chat template in the model, or with `raw`, the text alone, with the tokenizer's own first token (BOS);
    - messages, `[{"role": "user", "content": "..."}]`: through the chat template, `system` in front;
    - token ids: used as they are.
    """
    if isinstance(prompt, str):
        if raw or not tokenizer.chat_template:
            return _encode_raw(tokenizer, prompt, system, raw)
        if not prompt.strip():
            raise ForerunError("the prompt is empty; give some text")
        return _encode_chat(tokenizer, _with_system([{"role": "user", "content": prompt}], system))
    items = list(prompt)
    if not items:
        raise ForerunError("the prompt is empty; give some text, messages or token ids")
    if all(isinstance(item, Mapping) for item in items):
        if raw:
            raise ForerunError("messages need the chat template; give plain text to use raw")
        return _encode_chat(tokenizer, _with_system(_checked_messages(items), system))
    if system is not None:
        raise ForerunError("a system prompt cannot be added to token ids; put its tokens into the prompt")
    return _checked_ids(items, len(tokenizer))


def _encode_raw(tokenizer: PreTrainedTokenizerBase, text: str, system: str | None, raw: bool) -> list[int]:
    if system is not None:
        reason = "raw prompts use no chat template" if raw else "this model has no chat template"
        raise ForerunError(f"{reason}, so a system prompt has no place; put it into the prompt")
    if not text:
        raise ForerunError("the prompt is empty; give some text")
    _check_unicode(text)
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    return _not_empty(ids)


def _encode_chat(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[int]:
    if not tokenizer.chat_template:
        raise ForerunError("this model has no chat template, so it cannot take messages; give the prompt as plain text")
    contents = [message["content"] for message in messages]
    for content in contents:
        _check_unicode(content)
    written = [text for text in _control_texts(tokenizer) if any(text in content for content in contents)]
    if written:
        return _not_empty(_encode_guarded(tokenizer, messages, written))
    rendered = _render(tokenizer, messages)
    ids: list[int] = tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"]
    return _not_empty(ids)


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    from jinja2 import TemplateError

    try:
        rendered = tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
        )
    # A template is a program of the model's: besides jinja's own errors it can fail like any Python expression.
    except (
        TemplateError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        detail = " ".join(str(error).split()) or type(error).__name__
        raise ForerunError(f"the model's chat template cannot render these messages: {detail}") from error
    return str(rendered)


def _encode_guarded(tokenizer: PreTrainedTokenizerBase, messages: list[Message], written: list[str]) -> list[int]:
    """Encodes messages that contain the text of control tokens, which then stay text.

    The texts are masked before rendering, so every control token found in the result is the template's. Those keep
    their ids; the stretches between them, unmasked again, are encoded as a tokenizer without added tokens would. That
    is also how a tokenizer works: it cuts at its added tokens first.
    """
    mask = _unused_character([*(message["content"] for message in messages), str(tokenizer.chat_template)])
    pattern = re.compile("|".join(re.escape(text) for text in sorted(written, key=len, reverse=True)))
    masked = [
        {**message, "content": pattern.sub(lambda found: f"{mask}{written.index(found[0])}{mask}", message["content"])}
        for message in messages
    ]
    rendered = _render(tokenizer, masked)
    encoded = tokenizer(rendered, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    ids: list[int] = []
    begin = 0
    for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        if token in added and added[token].content in rendered[start:end]:
            ids += _encode_plain(tokenizer, _unmask(rendered[begin:start], mask, written), first=begin == 0)
            ids.append(token)
            begin = end
    return ids + _encode_plain(tokenizer, _unmask(rendered[begin:], mask, written), first=begin == 0)


def _unmask(text: str, mask: str, written: Sequence[str]) -> str:
    return re.sub(f"{mask}([0-9]+){mask}", lambda found: written[int(found[1])], text)


def _encode_plain(tokenizer: PreTrainedTokenizerBase, text: str, *, first: bool) -> list[int]:
    """Ids of a stretch of text, added tokens in it read as ordinary characters."""
    if not text:
        return []
    backend = tokenizer.backend_tokenizer
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    splitter = _splitter(backend.pre_tokenizer, first=first)
    pieces = [piece for piece, _ in splitter.pre_tokenize_str(text)] if splitter is not None else [text]
    return [token.id for piece in pieces for token in backend.model.tokenize(piece)]


def _splitter(pre_tokenizer: Any, *, first: bool) -> Any:
    """The pre-tokenizer; one that puts a space before the first stretch of a text must not do so for later ones."""
    from tokenizers.pre_tokenizers import Metaspace

    if first or not isinstance(pre_tokenizer, Metaspace) or pre_tokenizer.prepend_scheme != "first":
        return pre_tokenizer
    return Metaspace(replacement=pre_tokenizer.replacement, prepend_scheme="never", split=pre_tokenizer.split)


def _control_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    return [token.content for token in added if token.special or _LOOKS_LIKE_CONTROL.fullmatch(token.content)]


def _unused_character(texts: Iterable[str]) -> str:
    """A private-use character that none of the texts contains."""
    used = set().union(*texts)
    for code in _PRIVATE_USE:
        if chr(code) not in used:
            return chr(code)
    raise ForerunError("the prompt uses every private-use character and a control token's text; remove the latter")


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
        if message["role"] not in ROLES:
            raise ForerunError(f"message {number} has an unknown role; use one of {', '.join(ROLES)}")
        if not isinstance(message["content"], str):
            raise ForerunError(f"message {number} must have text as its content")
    if not any(message["content"].strip() for message in messages):
        raise ForerunError("the prompt is empty; give at least one message with text")
    return list(messages)


def _checked_ids(ids: Sequence[Any], vocabulary: int) -> list[int]:
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool):
            raise ForerunError("the prompt must be text, a list of messages or a list of token ids (whole numbers)")
        if not 0 <= token < vocabulary:
            raise ForerunError(f"the prompt has token id {token}, but the tokenizer's ids are 0 to {vocabulary - 1}")
    return list(ids)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ForerunError("the prompt is not valid Unicode text; give it as UTF-8") from error


def _not_empty(ids: list[int]) -> list[int]:
    if not ids:
        raise ForerunError("the prompt gives no tokens with this tokenizer; give some text")
    return ids
