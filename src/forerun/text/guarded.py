"""Text of users inside rendered prompts: control tokens typed by them stay text.

Control tokens are for the template to write. A message, a tool's description, an argument or a result that contains the
text of one (`<|im_end|>` ...) gets that text spelled out in ordinary tokens, so nobody can end a turn by typing it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forerun.errors import ForerunError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Added tokens spelled like this steer the model even where the tokenizer does not call them special.
_LOOKS_LIKE_CONTROL = re.compile(r"<[|｜].+[|｜]>|<[|｜].+>|<.+[|｜]>", re.DOTALL)
# And others in brackets do if the template writes them: `<tool_call>`.
_LOOKS_LIKE_MARK = re.compile(r"<.+>|\[.+\]", re.DOTALL)
_PRIVATE_USE = range(0xE000, 0xF900)
_DEEPEST = 100  # levels of objects and lists in what a user gives


def control_texts(tokenizer: PreTrainedTokenizerBase, template: str) -> list[str]:
    """Added tokens that steer the model: special ones, ones that look so, and marks that the template writes."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    return [
        token.content
        for token in added
        if token.special
        or _LOOKS_LIKE_CONTROL.fullmatch(token.content)
        or (_LOOKS_LIKE_MARK.fullmatch(token.content) and token.content in template)
    ]


def strings_in(value: Any, depth: int = 0) -> Iterator[str]:
    """Every text in a value made of objects and lists, names included."""
    if depth > _DEEPEST:
        raise ForerunError(f"a message or tool is nested more than {_DEEPEST} levels deep")
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_in(key, depth + 1)
            yield from strings_in(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item, depth + 1)


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """The same value with every text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_strings(key, change): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, change) for item in value]
    return value


class ControlTokenGuard:
    """Masks the control tokens in users' texts before rendering, and undoes it when the prompt is encoded."""

    def __init__(self, controls: Sequence[str], texts: Iterable[str], template: str) -> None:
        """`texts`: everything that users gave."""
        texts = list(texts)
        self._written = [control for control in controls if any(control in text for text in texts)]
        if self._written:
            self._mask = _unused_character([*texts, template])
            longest_first = sorted(self._written, key=len, reverse=True)
            self._pattern = re.compile("|".join(re.escape(text) for text in longest_first))
            escaped = f"\\\\u{ord(self._mask):04x}"  # as JSON with ASCII alone spells it
            self._masked = re.compile(f"{self._mask}([0-9]+){self._mask}|{escaped}([0-9]+){escaped}")

    def mask(self, text: str, *, allow: Sequence[str] = ()) -> str:
        """The text without control tokens, but for those in `allow`."""
        if not self._written:
            return text

        def replace(found: re.Match[str]) -> str:
            control = found[0]
            return control if control in allow else f"{self._mask}{self._written.index(control)}{self._mask}"

        return self._pattern.sub(replace, text)

    def unmask(self, text: str) -> str:
        """The text as the user wrote it."""
        if not self._written:
            return text
        return self._masked.sub(lambda found: self._written[int(found[1] or found[2])], text)

    def encode(self, tokenizer: PreTrainedTokenizerBase, rendered: str) -> list[int]:
        """Token ids of a rendered prompt.

        Every control token found in it is the template's. Those keep their ids; the stretches between them, unmasked
        again, are encoded as a tokenizer without added tokens would. That is also how a tokenizer works: it cuts at
        its added tokens first.
        """
        if not self._written:
            ordinary: list[int] = tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"]
            return ordinary
        encoded = tokenizer(rendered, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        ids: list[int] = []
        begin = 0
        for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            if token in added and added[token].content in rendered[start:end]:
                ids += encode_plain(tokenizer, self.unmask(rendered[begin:start]), first=begin == 0)
                ids.append(token)
                begin = end
        return ids + encode_plain(tokenizer, self.unmask(rendered[begin:]), first=begin == 0)


def encode_plain(tokenizer: PreTrainedTokenizerBase, text: str, *, first: bool) -> list[int]:
    """Ids of a stretch of text, added tokens in it read as ordinary characters."""
    if not text:
        return []
    backend = tokenizer.backend_tokenizer
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    splitter = _splitter(backend.pre_tokenizer, first=first)
    pieces = [piece for piece, _ in splitter.pre_tokenize_str(text)] if splitter is not None else [text]
    return [token.id for piece in pieces for token in backend.model.tokenize(piece)]


def check_unicode(texts: Iterable[str]) -> None:
    """Lone surrogates have no tokens."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ForerunError("the prompt is not valid Unicode text; give it as UTF-8") from error


def _splitter(pre_tokenizer: Any, *, first: bool) -> Any:
    """The pre-tokenizer; one that puts a space before the first stretch of a text must not do so for later ones."""
    from tokenizers.pre_tokenizers import Metaspace

    if first or not isinstance(pre_tokenizer, Metaspace) or pre_tokenizer.prepend_scheme != "first":
        return pre_tokenizer
    return Metaspace(replacement=pre_tokenizer.replacement, prepend_scheme="never", split=pre_tokenizer.split)


def _unused_character(texts: Iterable[str]) -> str:
    """A private-use character that none of the texts contains, nor as JSON escapes it."""
    texts = list(texts)
    used = set().union(*texts)
    for code in _PRIVATE_USE:
        if chr(code) not in used and not any(f"\\u{code:04x}" in text for text in texts):
            return chr(code)
    raise ForerunError("the prompt uses every private-use character and a control token's text; remove the latter")
