"""Many prompts into token ids, fast; and the beginning of a user's turn, from which a model writes prompts itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forerun.errors import ForerunError
from forerun.text.chat import chat_template
from forerun.train.prompts.prompt import TrainingPrompt

MARK = "\ue123"  # a private-use character stands for the user's text
PROBE = " Is this\n\n a *test*, or not? "


class PromptEncoder:
    """Encodes as `forerun generate` does; a plain user message skips the template engine where that changes nothing."""

    def __init__(self, tokenizer: Any, vocab: int) -> None:
        """`vocab`: rows of the model's embedding, which a tokenizer that was added to may outgrow."""
        self.tokenizer, self.vocab = tokenizer, vocab
        self._template = chat_template(tokenizer) if tokenizer.chat_template else None
        self._frame = self._find_frame()
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
        self._controls = [token.content for token in added if token.special or token.content.startswith("<|")]

    def _find_frame(self) -> tuple[str, str] | None:
        """What the chat template writes before and after a user's text."""
        if self._template is None:
            return None
        try:
            rendered, probed = (self._template.render([{"role": "user", "content": text}]) for text in (MARK, PROBE))
        except ForerunError:  # it may want a system message first
            return None
        before, found, after = rendered.partition(MARK)
        same = before + PROBE + after == probed
        return (before, after) if found and MARK not in after and same else None

    def encode_all(self, prompts: Sequence[TrainingPrompt]) -> list[list[int] | None]:
        """Ids of every prompt; None where it cannot be one.

        It may have control tokens in its text, or tokens that the model lacks, or be refused by the template.
        """
        texts = [self._rendered(prompt) for prompt in prompts]
        good = [text for text in texts if text is not None]
        if not good:
            return [None] * len(texts)
        ids = iter(self.tokenizer(good, add_special_tokens=self._template is None, verbose=False)["input_ids"])
        found = [next(ids) if text is not None else None for text in texts]
        return [each if each and max(each) < self.vocab else None for each in found]

    def _rendered(self, prompt: TrainingPrompt) -> str | None:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if any(control in message["content"] for message in messages for control in self._controls):
            return None
        if self._template is None:
            return "\n\n".join(message["content"] for message in messages)
        if isinstance(prompt, str) and self._frame is not None:
            return self._frame[0] + prompt + self._frame[1]
        try:
            return self._template.render(messages)
        except ForerunError:  # a template may refuse a prompt, which is left out then
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
