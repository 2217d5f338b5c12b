"""The model card of a trained head, filled in from the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LICENCE = (
    "The prompts were written for forerun, cut from Python's own documentation and standard library (PSF licence), or "
    "written by the model itself; no public benchmark is among them. Every answer was written by the target. Prompts "
    "that share eight words in a row with the evaluation were left out."
)

GIVEN = (
    "The prompts were given by whoever trained the head. Every answer was written by the target. Prompts that share "
    "eight words in a row with the evaluation were left out."
)


def model_card(name: str, report: dict[str, Any], user_prompts: bool) -> str:
    """Markdown: what the head is, what it was trained on, how, and what it reaches."""
    data, training, head = report["data"], report["training"], report["head"]
    vocabulary = report["draft_vocab"]
    lines = [
        f"# MTP head for {name}",
        "",
        f"A one-layer head that drafts the next tokens of {name} for speculative decoding with forerun. It never "
        "changes the text, only the speed. It works with this target alone.",
        "",
        "## Shape",
        f"{head['parameters'] / 1e6:.2f} M parameters, the layer's matrices in 8 bits with a scale per row, the others "
        "in bfloat16. Input: the embedding of the next token and the "
        f"target's hidden states before layers {', '.join(map(str, head['taps'])) or 'none'} and after the final norm; "
        f"one decoder layer (feed-forward width {head['intermediate']}); the target's own output matrix, cut to "
        f"{vocabulary['size']} ids.",
        "",
        "## Data",
        f"{data['answers']} answers, {data['tokens'] / 1e6:.1f} M tokens with their prompts; "
        f"{report['settings']['greedy_share']:.0%} greedy, the others sampled (temperature 0.7, some 0.8 and 1.0); "
        "loops cut, duplicates dropped. Sources, and the prompts that each offered, not all of which were answered:",
        *(f"- {source}: {count} prompts" for source, count in data["sources"].items()),
        *_earlier_data(report["history"]),
        "",
        LICENCE if not user_prompts else GIVEN,
        "",
        "## Recipe",
        *_earlier_training(report["history"]),
        f"Cross-entropy with the target's distribution{_hard(training)}{_agree(training)} over {training['unroll']} "
        f"unrolled steps, each seeing true entries up to its base position and its own chain after it; step j weighs "
        f"{training['decay']}^j{_missed(training)}. {_optimiser(training, report['device'])} Kept: {training['kept']}.",
        "",
        "## Figures",
        f'On held-out prompts, {report["evaluation_tokens"]} tokens each at most. "All" counts every answer, also '
        "those that fall into a loop, which any drafter guesses; kinds are without loops.",
        "",
        *figures(report),
        "",
        "Tokens per round at depth 4 by draft vocabulary (greedy, all answers): "
        + ", ".join(f"{size}: {rate:.3f}" for size, rate in vocabulary["tokens_per_round"].items())
        + ".",
        "",
    ]
    return "\n".join(lines)


def _optimiser(training: dict[str, Any], device: str) -> str:
    optimiser = training.get("optimiser", "AdamW")  # histories of earlier versions do not name it
    return (
        f"{optimiser}, {training['rate']:g} with a cosine, {training['steps']} steps, "
        f"{training['positions'] / 1e6:.0f} M positions in {training['seconds'] / 60:.1f} minutes on {device}."
    )


def _earlier_data(history: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each run that this head went through before."""
    return [
        f"- before that: {run['data']['answers']} answers, {run['data']['tokens'] / 1e6:.1f} M tokens"
        for run in history
    ]


def _earlier_training(history: Sequence[dict[str, Any]]) -> list[str]:
    first = "Started from the target's last layer."
    return [first, *(f"An earlier run: {_optimiser(run['training'], run['device'])} Then:" for run in history)]


def _hard(training: dict[str, Any]) -> str:
    return f" ({training['hard']:.0%} of it moved to its likeliest token)" if training["hard"] else ""


def _agree(training: dict[str, Any]) -> str:
    if not training.get("agree"):
        return ""
    heats = " and ".join(f"{heat:g}" for heat in training["agree_at"])
    begins = training.get("agree_from", 0.0)
    when = f" from {begins:.0%} of the run on" if begins else ""
    return f", less {training['agree']:g} times the share of equal choices under the same noise at {heats}{when},"


def _missed(training: dict[str, Any]) -> str:
    if training["missed"] >= 1:
        return ""
    return f"; where an earlier draft is wrong, {training['missed']:.0%} of the later ones count"


def figures(report: dict[str, Any]) -> list[str]:
    """Tables of acceptance, as Markdown lines."""
    lines: list[str] = []
    parts = [
        (f"{collection}: {title}", tables[key])
        for collection, tables in report["evaluation"].items()
        for title, key in (("greedy", "greedy"), ("temperature 0.8, coupled", "sampled"))
    ]
    for title, table in parts:
        rows = [("all", table["all"]), ("all, loops left out", table["without_loops"]), ("loops", table["loops"])]
        rows += [(f"all {length}", row) for length, row in table.get("by_length", {}).items()]
        rows += table["by_category"].items()  # the user named them, "all" perhaps
        lines += [
            f"### {title[0].upper()}{title[1:]}",
            "| prompts | answers | first draft | accepted prefix, draft 1–6 | tokens per round, depth 4 | depth 6 |",
            "|---|---|---|---|---|---|",
        ]
        for name, row in rows:
            if row["answers"] == 0:
                continue
            prefix = " ".join(f"{share:.2f}".lstrip("0") for share in row["prefix"])
            four, six = (row["tokens_per_round"][depth] for depth in ("4", "6"))
            lines.append(f"| {name} | {row['answers']} | {row['first']:.3f} | {prefix} | {four:.2f} | {six:.2f} |")
        lines.append("")
    return lines
