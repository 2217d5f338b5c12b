"""What `forerun generate` says about an answer: a line of statistics, and with `--explain` what each arm did."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.response import Response


def print_explanation(response: Response) -> None:
    """A small table on stderr and three lines below it."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stderr, highlight=False, width=120)
    table = Table("arm", box=None)
    for name in ("rounds", "drafts/round", "accepted", "tokens/round", "ms/token"):
        table.add_column(name, justify="right")
    for arm, use in response.arms.items():
        tokens = use.rounds + use.accepted
        table.add_row(
            arm,
            str(use.rounds),
            f"{use.drafted / use.rounds:.1f}" if use.drafted else "–",
            f"{100 * use.accepted / use.drafted:.0f} %" if use.drafted else "–",
            f"{tokens / use.rounds:.2f}",
            f"{1000 * use.seconds / tokens:.1f}",
        )
    console.print(table)
    for line in explanation_lines(response):
        console.print(line, soft_wrap=True)


def explanation_lines(response: Response) -> list[str]:
    """Acceptance by position, where the time went, and what was saved."""
    lines = []
    if response.per_position:
        shares = " ".join(f"{100 * share:.0f}" for share in response.accepted_per_position)
        lines.append(f"accepted at position 1, 2, … (%): {shares}")
    draft, verify = response.seconds["draft"], response.seconds["verify"]
    lines.append(f"drafting and deciding {draft:.2f} s, verifying {verify:.2f} s")
    if response.seconds_saved is not None:
        lines.append(
            f"saved against plain decoding, by its rounds measured in this run: {response.seconds_saved:.2f} s"
        )
    return lines


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
