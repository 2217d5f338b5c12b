"""How wide prompts are: their kinds, their lengths, what they share with each other and with the evaluation.

A head drafts well on the kinds of text it was trained on, so what a set of prompts lacks is worth knowing before a GPU
is busy with it for half an hour.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from forerun.train.prompts.prompt import TrainingPrompt

LONG = 300  # tokens
SHARES = (0.1, 0.5, 0.9)
# The first pattern that is found in what the user writes names the kind; what asks nothing of these is "other".
KINDS = {
    "translation": r"\btranslat|\bin (german|french|spanish|italian|english|chinese|japanese)\b",
    "summary": r"\bsummar|\btl;?dr\b|\bcondense|\bmain points|\bkey (facts|points)|\bin short\b",
    "code": r"```|\b(python|javascript|java|sql|html|function|script|code)\b|\bc\+\+|def \w+\(",
    "extraction": r"\bextract|\bjson\b|\btable\b|\bclassify|\blist (all|every|the)\b",
    "maths": r"\bhow (many|much)\b|\bsolve\b|\bcalculate|\d+ ?[-+*/×=] ?\d+|\bpercent",
    "writing": r"\b(write|compose|draft|rewrite|story|poem|essay|email|letter)\b",
    "roleplay": r"\b(pretend|act as|imagine you|you are an?|role)\b",
    "question": r"\?|^(who|what|when|where|why|which|how|is|are|does|do|can|explain|describe|name)\b",
}
EXPECTED = ("question", "writing", "maths", "code", "summary")
FEW = 0.01


def kind_of(prompt: TrainingPrompt) -> str:
    """What a prompt asks for, guessed from its words; what it asks stands at its beginning or its end."""
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    asked = (text if len(text) < 600 else f"{text[:300]}\n{text[-300:]}").lower()
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, asked)), "other")


def nearly(prompt: TrainingPrompt) -> str:
    """The same for prompts that differ in case and signs alone."""
    said = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
    return " ".join(re.findall(r"\w+", said.lower())) or said


def survey(
    prompts: Sequence[TrainingPrompt],
    lengths: Sequence[int],
    most: int,
    repeated: int,
    evaluated: int,
    refused: int = 0,
) -> list[str]:
    """Lines for people to read, about prompts of so many tokens; `most`: tokens that one may have.

    Gone already are those that repeat another one, that share words with the evaluation, or that were refused.
    """
    kinds, count = Counter(map(kind_of, prompts)), max(len(prompts), 1)
    shares = ", ".join(f"{name} {many / count:.0%}" for name, many in kinds.most_common())
    ordered = sorted(lengths) or [0]
    at = ", ".join(f"{share:.0%} up to {ordered[int(share * (len(ordered) - 1))]}" for share in SHARES)
    long, too_long = (sum(length > limit for length in lengths) for limit in (LONG, most))
    told = [
        f"{len(prompts)} prompts: {shares}; {sum(map(_goes_on, prompts))} with several turns",
        f"tokens: {at}, the longest {ordered[-1]}; {long} over {LONG}",
        f"left out: {repeated} that repeat another one, {evaluated} that share eight words in a row with "
        f"the evaluation, {too_long} that are too long, {refused} that the chat template does not take",
    ]
    missing = [name for name in EXPECTED if kinds[name] < FEW * len(prompts)]
    if long - too_long < FEW * len(prompts):
        missing.append(f"inputs over {LONG} tokens")
    if missing:
        told.append(f"hardly any {', '.join(missing)}: the head will draft worse on such prompts")
    return told


def _goes_on(prompt: TrainingPrompt) -> bool:
    """Did somebody answer before? What a system message says is no turn."""
    return not isinstance(prompt, str) and sum(message["role"] != "system" for message in prompt) > 1
