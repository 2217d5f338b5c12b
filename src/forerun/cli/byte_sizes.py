"""Sizes in binary units, as memory is sold."""

from __future__ import annotations


def readable_bytes(count: int) -> str:
    """1536 → `1.5 KiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
