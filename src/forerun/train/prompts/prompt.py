"""A prompt: what a user writes, or a whole conversation."""

from __future__ import annotations

TrainingPrompt = str | list[dict[str, str]]


def text_of(prompt: TrainingPrompt) -> str:
    """What the user wrote, for comparing prompts."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(message["content"] for message in prompt if message["role"] == "user")
