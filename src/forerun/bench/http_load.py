"""The half of `forerun bench --load` that asks a server: forerun's with every arm it has, another's as it is."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Self

from forerun.bench.http_client import Address, HttpError
from forerun.bench.load import OFF, Job, TimedAnswer
from forerun.bench.runner import NAMED_ARMS
from forerun.errors import ForerunError

CHAT = "/v1/chat/completions"
UNKNOWN_PATH = (404, 405, 501)  # what servers answer where there is nothing


class HttpTarget:
    """A server that streams as OpenAI's does."""

    def __init__(self, server: Address, model: str | None, props: Mapping[str, Any] | None) -> None:
        """`props`: what forerun's server says of itself; None: it is another one, which cannot be told to draft."""
        self.server, self.model, self.ours = server, model, props is not None
        about = props or {}
        drafters = about.get("drafters", ())
        self.arms = (OFF, *(arm for arm in NAMED_ARMS if arm in drafters), "auto") if self.ours else (OFF,)
        self.on_cpu = about.get("device") == "cpu"

    @classmethod
    async def find(cls, server: Address) -> Self:
        """Ask it what it is."""
        props = await _fetch(server, "/props")
        ours = isinstance(props, dict) and isinstance(props.get("settings"), dict) and "version" in props
        models = await _fetch(server, "/v1/models")
        listed = models.get("data") if isinstance(models, dict) else None
        names = [entry.get("id") for entry in listed or () if isinstance(entry, dict)]
        return cls(server, names[0] if names else None, props if ours else None)

    def prepare(self, jobs: Sequence[Job]) -> None:
        """The server tokenises, and refuses."""

    async def answer(self, job: Job, since: float, arm: str) -> TimedAnswer:
        """One answer, timed at this end."""
        times, text, pieces, end = [since], list[str](), 0, dict[str, Any]()
        for now, event in await self.server.stream(CHAT, self._body(job, arm)) or ():
            for choice in event["choices"]:
                delta = choice["delta"]
                piece = delta.get("reasoning_content") or delta.get("content")
                if piece:
                    text.append(piece)
                    pieces += 1
                    if now > times[-1]:
                        times.append(now)
            if event.get("usage"):
                end = event
        usage = end.get("usage", {})
        tokens = usage.get("completion_tokens", pieces)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        gaps = [after - before for before, after in pairwise(times)]
        return TimedAnswer(
            text="".join(text),
            tokens=tokens,
            first=gaps[0] if gaps else time.perf_counter() - since,
            gaps=gaps[1:],
            prompt_rows=usage.get("prompt_tokens", 0) - cached,
            other_rows=_rows(end, tokens),
        )

    def _body(self, job: Job, arm: str) -> dict[str, Any]:
        """As a server takes it."""
        return {
            "messages": job.messages,
            "max_tokens": job.max_tokens,
            "temperature": job.temperature,
            "seed": job.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({} if self.model is None else {"model": self.model}),
            **({"speculative": arm} if self.ours else {}),
        }


def _rows(end: Mapping[str, Any], tokens: int) -> int:
    """Rows of passes after the prompt: forerun tells rounds and drafts; elsewhere each token but the first is one."""
    own, drafting = end.get("forerun"), (end.get("metrics") or {}).get("speculative_decoding")
    if own is None or drafting is None:
        return max(0, tokens - 1)
    return int(own["rounds"]) + int(drafting["num_draft_tokens"])


async def _fetch(server: Address, path: str) -> Any:
    """A document that not every server has."""
    try:
        return await server.fetch(path)
    except HttpError as error:
        if error.status in UNKNOWN_PATH:
            return None
        raise
    except ForerunError:
        if path == "/props":
            return None  # a page for people, say; what is really wrong shows at the next question
        raise
