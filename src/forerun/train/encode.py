"""Many prompts into token ids, fast; and the beginning of a user's turn, from which a model writes prompts itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forerun.errors import ForerunError
from forerun.train.prompts.prompt import Prompt

MARK = "\ue123"  # a private-use character stands for the user's text
PROBE = " Is this\n\n a *test*, or not? "


class Encoder:
    """Encodes as `forerun generate` does; a plain user message skips the template engine where that changes nothing."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._frame = self._find_frame()
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
        self._controls = [token.content for token in added if token.special or token.content.startswith("<|")]

    def _find_frame(self) -> tuple[str, str] | None:
        """What the chat template writes before and after a user's text."""
        if not self.tokenizer.chat_template:
            return None
        rendered = self._render([{"role": "user", "content": MARK}])
        before, found, after = rendered.partition(MARK)
        same = before + PROBE + after == self._render([{"role": "user", "content": PROBE}])
        return (before, after) if found and MARK not in after and same else None

    def _render(self, messages: list[dict[str, str]]) -> str:
        return str(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    def encode_all(self, prompts: Sequence[Prompt]) -> list[list[int] | None]:
        """Ids of every prompt; None where it cannot be one (control tokens in its text, a refusing template)."""
        texts = [self._rendered(prompt) for prompt in prompts]
        good = [text for text in texts if text is not None]
        if not good:
            return [None] * len(texts)
        special = not self.tokenizer.chat_template
        ids = iter(self.tokenizer(good, add_special_tokens=special, verbose=False)["input_ids"])
        return [next(ids) if text is not None else None for text in texts]

    def _rendered(self, prompt: Prompt) -> str | None:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if any(control in message["content"] for message in messages for control in self._controls):
            return None
        if not self.tokenizer.chat_template:
            return "\n\n".join(message["content"] for message in messages)
        if isinstance(prompt, str) and self._frame is not None:
            return self._frame[0] + prompt + self._frame[1]
        try:
            return self._render(messages)
        except Exception:  # noqa: BLE001 - a template may fail in any way, and then this prompt is left out
            return None

    def user_turn(self) -> list[int] | None:
        """The ids a user's text would follow; None when the template does not say."""
        if self._frame is None:
            return None
        ids: list[int] = self.tokenizer(self._frame[0], add_special_tokens=False, verbose=False)["input_ids"]
        return ids or None

    def decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def check_some(prompts: Sequence[object]) -> None:
    """A run without prompts has nothing to learn from."""
    if not prompts:
        raise ForerunError("no usable prompts: all are too long, in the evaluation, or not what the template takes")
