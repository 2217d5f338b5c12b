"""How much media a prompt may bring. Checked before anything is decoded, wherever a file says how large it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """What a prompt may bring at most; each is the largest value allowed."""

    items: int = 32  # pictures, films and recordings of one prompt
    file_bytes: int = 64 * 2**20
    image_pixels: int = 50_000_000  # what large telephones take; 200 MB while it is decoded
    frame_pixels: int = 4096 * 2304  # of a film: 4K
    video_frames: int = 18_000  # that a film has: all before the last one looked at must be decoded
    video_seconds: int = 600
    audio_seconds: int = 300
    soft_tokens: int = 16_384  # rows that all media of a prompt take together
