"""What an answer took, in the words of three: vLLM's metrics, llama.cpp's timings, and our own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forerun.proof import Proof
from forerun.response import Response
from forerun.serve.engine_client import Ended


def statistics(
    ended: Sequence[Ended], prompt_tokens: int, cached: int, warnings: Sequence[str], proof: Proof | None = None
) -> dict[str, Any]:
    """Of all choices of one request together; choices of the same prompt share its tokens.

    `cached`: part of `prompt_tokens`, read by none of them.
    """
    responses = [end.response for end in ended]
    if not responses:
        return {}
    return {
        "metrics": {"speculative_decoding": _speculative_decoding(responses)},
        "timings": _timings(responses, prompt_tokens - cached, cached),
        "forerun": _own(ended, warnings) | ({} if proof is None else {"proof": proof.to_dict()}),
    }


def _speculative_decoding(responses: Sequence[Response]) -> dict[str, Any]:
    drafted, accepted = sum(r.drafted for r in responses), sum(r.accepted for r in responses)
    steps = sum(r.per_position[0][0] for r in responses if r.per_position)
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_histogram": _histogram(responses, steps),
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
    }


def _histogram(responses: Sequence[Response], steps: int) -> list[int]:
    """How many rounds with drafts had 0, 1, 2 … of them accepted."""
    deepest = max(len(r.per_position) for r in responses)
    at_least = [steps] + [
        sum(r.per_position[position][1] for r in responses if position < len(r.per_position))
        for position in range(deepest)
    ]
    return [more - less for more, less in zip(at_least, [*at_least[1:], 0], strict=True)] if steps else []


def _timings(responses: Sequence[Response], prompt: int, cached: int) -> dict[str, Any]:
    """Choices run side by side: the longest of each time, the sum of each count. `prompt`: tokens that were read."""
    predicted = sum(r.completion_tokens for r in responses)
    prompt_seconds = max(r.seconds.get("prefill", 0.0) for r in responses)
    seconds = max(r.seconds.get("decode", 0.0) for r in responses)
    rate = sum(r.tokens_per_second for r in responses)
    return {
        "prompt_n": prompt,
        "cache_n": cached,
        "prompt_ms": prompt_seconds * 1000,
        "prompt_per_token_ms": prompt_seconds * 1000 / prompt if prompt else 0.0,
        "prompt_per_second": prompt / prompt_seconds if prompt_seconds else 0.0,
        "predicted_n": predicted,
        "predicted_ms": seconds * 1000,
        "predicted_per_token_ms": 1000 / rate if rate else 0.0,
        "predicted_per_second": rate,
        "draft_n": sum(r.drafted for r in responses),
        "draft_n_accepted": sum(r.accepted for r in responses),
    }


def _own(ended: Sequence[Ended], warnings: Sequence[str]) -> dict[str, Any]:
    responses = [end.response for end in ended]
    rounds, accepted = sum(r.rounds for r in responses), sum(r.accepted for r in responses)
    saved = [r.seconds_saved for r in responses if r.seconds_saved is not None]
    arms: dict[str, int] = {}
    for response in responses:
        for arm, use in response.arms.items():
            arms[arm] = arms.get(arm, 0) + use.rounds
    return {
        "tokens_per_round": 1 + accepted / rounds if rounds else None,
        "rounds": rounds,
        "seconds_saved": sum(saved) if saved else None,
        "tokens_per_second": sum(r.tokens_per_second for r in responses),
        "queue_seconds": max(end.queue_seconds for end in ended),
        "first_token_seconds": max(end.first_token_seconds for end in ended),
        "seed": responses[0].seed,
        "accept": responses[0].accept,
        "guaranteed": all(r.guaranteed for r in responses),
        "draft": responses[0].draft,
        "arms": arms,  # rounds of each
        "warnings": list(dict.fromkeys([*warnings, *(warning for r in responses for warning in r.warnings)])),
    }
