"""The line at the end of an answer: how fast it was, what drafting brought, and whether the text is guaranteed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun import Response

SEPARATOR = " · "


def statistics_line(response: Response, *, sampled: bool, rejection: bool) -> str:
    """`128 tokens · 71.3 tok/s · 2.31 tokens/round · 61 % of drafts accepted · lookup · same text … guaranteed`."""
    parts = [count_tokens(response.completion_tokens), f"{response.tokens_per_second:.1f} tok/s"]
    if response.rounds:
        parts.append(f"{response.completion_tokens / response.rounds:.2f} tokens/round")
    if response.drafted:
        parts.append(f"{100 * response.accepted / response.drafted:.0f} % of drafts accepted")
    else:
        parts.append("no drafts")
    parts.append("plain decoding" if response.draft == "off" else response.draft)
    if sampled:
        parts.append(f"seed {response.seed}")
    parts.append(f"same text as plain decoding: {_promise(response, by_choice=sampled and rejection)}")
    return SEPARATOR.join(parts)


def _promise(response: Response, by_choice: bool) -> str:
    if response.guaranteed:
        return "guaranteed"
    return "not promised (rejection keeps the distribution)" if by_choice else "NOT GUARANTEED"


def interrupted_line(tokens: int, from_draft: int, seconds: float) -> str:
    """What is known of an answer that was cut off: there is no response to ask."""
    parts = [f"interrupted after {count_tokens(tokens)}"]
    if tokens and seconds > 0:
        parts.append(f"{tokens / seconds:.1f} tok/s")
        parts.append(f"{100 * from_draft / tokens:.0f} % of them drafted")
    return SEPARATOR.join(parts)


def count_tokens(count: int) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count} token{'' if count == 1 else 's'}"
