"""The line at the end of an answer: how fast it was, what drafting brought, and whether the text is guaranteed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.response import Response


def statistics_line(response: Response, *, sampled: bool, rejection: bool) -> str:
    """`128 tokens · 71.3 tok/s · 2.31 tokens/round · 61 % of drafts accepted · lookup · same text … guaranteed`."""
    count = response.completion_tokens
    parts = [f"{count} token{'' if count == 1 else 's'}", f"{response.tokens_per_second:.1f} tok/s"]
    if response.rounds:
        parts.append(f"{response.tokens_per_round:.2f} tokens/round")
    if response.drafted:
        parts.append(f"{100 * response.accepted / response.drafted:.0f} % of drafts accepted")
    else:
        parts.append("no drafts")
    parts.append("plain decoding" if response.draft == "off" else response.draft)
    if sampled:
        parts.append(f"seed {response.seed}")
    parts.append(f"same text as plain decoding: {_promise(response, rejection)}")
    if response.finish_reason == "cancelled":
        parts.insert(0, "interrupted")
    return " · ".join(parts)


def _promise(response: Response, rejection: bool) -> str:
    if response.guaranteed:
        return "guaranteed"
    return "not promised (rejection keeps the distribution)" if rejection else "NOT GUARANTEED"
