"""Folders with tiny models that see, chat templates and all, and files to show them."""

from __future__ import annotations

from pathlib import Path

from fake_media import MARKED, VISION
from media_files import encoded, film_file, picture, sound_file
from tiny_media import (
    GEMMA_TOKENS,
    QWEN_TOKENS,
    media_tokenizer,
    random_media_gemma,
    random_media_qwen,
    save_media_gemma,
    save_media_qwen,
)


def seeing_gemma(folder: Path) -> Path:
    """It hears as well."""
    save_media_gemma(folder, random_media_gemma("E4B"))
    return _with_template(folder, list(GEMMA_TOKENS.values()), VISION)


def seeing_qwen(folder: Path) -> Path:
    """Pictures and films."""
    save_media_qwen(folder, random_media_qwen(sparse=False))
    template = MARKED.replace("<|image|>", "<|image_pad|>").replace("<|video|>", "<|video_pad|>")
    return _with_template(folder, list(QWEN_TOKENS.values()), template)


def _with_template(folder: Path, tokens: list[str], template: str) -> Path:
    tokenizer = media_tokenizer(tokens)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    (folder / "photo.jpg").write_bytes(encoded(picture(seed=1), "JPEG"))
    (folder / "talk.mp4").write_bytes(film_file([picture(seed=n) for n in range(3)]))
    (folder / "talk.wav").write_bytes(sound_file())
    return folder
