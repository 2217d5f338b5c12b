"""Media for tests: templates that write placeholders, and a reader that makes rows of whatever a file's bytes are."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from chat_templates import tokenizer_with

from forerun.errors import ForerunError
from forerun.media.parts import Kind, MediaPart, MediaPrompt
from forerun.models.layers.media import MediaRun, PromptMedia

PLACEHOLDERS = {"image": "<|image|>", "video": "<|video|>", "audio": "<|audio|>"}
# As Gemma 4's: contents are text or parts, each with a place of its own; texts are trimmed.
VISION = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for item in message.content -%}
{%- if item.type == 'text' -%}{{- item.text | trim -}}
{%- elif item.type == 'image' -%}{{- '<|image|>' -}}
{%- elif item.type == 'video' -%}{{- '<|video|>' -}}
{%- elif item.type == 'audio' -%}{{- '<|audio|>' -}}
{%- endif -%}{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
# As Qwen's: marks around each place, anything with a text is text.
MARKED = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for item in message.content -%}
{%- if item.type == 'image' or 'image' in item -%}{{- '<|vision_start|><|image|><|vision_end|>' -}}
{%- elif item.type == 'video' or 'video' in item -%}{{- '<|vision_start|><|video|><|vision_end|>' -}}
{%- elif 'text' in item -%}{{- item.text -}}
{%- else -%}{{- raise_exception('Unexpected item type in content.') -}}
{%- endif -%}{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def seeing_tokenizer(template: str = VISION) -> Any:
    """The tiny tokenizer with a placeholder for each kind, ids 290 to 292: more than a tiny model ever says."""
    return tokenizer_with(template, *PLACEHOLDERS.values(), "<|vision_start|>", "<|vision_end|>")


@dataclass
class FakeReader:
    """A `MediaReader`: a file becomes a few random rows, the same ones whenever it comes again."""

    tokenizer: Any
    hidden: int = 64
    kinds: frozenset[Kind] = frozenset(("image", "video", "audio"))
    whole: bool = False
    weight_bytes: int = 0
    read_parts: list[list[MediaPart]] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)

    @property
    def placeholders(self) -> dict[int, Any]:
        return {self.tokenizer.convert_tokens_to_ids(text): kind for kind, text in PLACEHOLDERS.items()}

    def read(self, ids: Sequence[int], parts: Sequence[MediaPart]) -> MediaPrompt:
        self.read_parts.append(list(parts))
        self.threads.add(threading.current_thread().name)
        return self._expand(ids, parts)

    def _expand(self, ids: Sequence[int], parts: Sequence[MediaPart]) -> MediaPrompt:
        kind_of = self.placeholders
        waiting, expanded, runs = list(parts), list[int](), list[MediaRun]()
        for token in ids:
            if token not in kind_of:
                expanded.append(token)
                continue
            if not waiting or waiting[0].kind != kind_of[token]:
                raise ForerunError("there are more placeholders than media")
            embeddings = self.rows(waiting.pop(0))
            runs.append(MediaRun(len(expanded), embeddings, self.whole))
            expanded += [token] * len(embeddings)
        if waiting:
            raise ForerunError(f"{waiting[0].name} has no placeholder in the prompt")
        return MediaPrompt(expanded, PromptMedia(runs))

    def count(self, ids: Sequence[int], parts: Sequence[MediaPart]) -> int:
        return len(self._expand(ids, parts).ids)

    def rows(self, part: MediaPart) -> torch.Tensor:
        if part.data.startswith(b"not"):
            raise ForerunError(f"{part.name} is not an {part.kind} that can be read")
        digest = hashlib.sha256(part.data).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
        return torch.randn(4 + digest[0] % 4, self.hidden, generator=generator)
