"""A request's answers, decoded again plainly once they have ended, and compared."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from forerun import __version__
from forerun.proof import Decoded, Proof, prove
from forerun.serve.engine_client import Answer, Ended, EngineClient, Work
from forerun.serve.error_bodies import as_api_error
from forerun.serve.errors import ApiError
from forerun.text.token_bytes import TokenBytes


class Prover:
    """Of one request. It asks for a place in the rounds only when the answers themselves are whole."""

    def __init__(
        self, engine: EngineClient, model: str, token_bytes: TokenBytes, work: Sequence[Work], plain: Sequence[Work]
    ) -> None:
        """`plain`: the same as `work`, without drafts."""
        self._engine, self._about, self._token_bytes = engine, f"forerun {__version__}, {model}", token_bytes
        self._requests, self._plain = [one.request for one in work], plain
        self._answers: Sequence[Answer] = ()

    async def prove(self, ended: Sequence[Ended]) -> Proof:
        """`ended`: how the answers did. A decoding that fails is no reason to lose them."""
        try:
            self._answers = await self._engine.start(self._plain)
            plain = await asyncio.gather(*(_end_of(answer) for answer in self._answers))
        except Exception as error:  # noqa: BLE001 - it is told in place of the proof
            return Proof(None, error=as_api_error(error).message)
        finally:
            await self.close()
        return prove(
            self._requests,
            [_decoded(end) for end in ended],
            [_decoded(end) for end in plain],
            lambda token: self._token_bytes.of(token)[0],
            self._about,
        )

    async def close(self) -> None:
        """Stop what still runs."""
        for answer in self._answers:
            await answer.close()


async def _end_of(answer: Answer) -> Ended:
    async for item in answer:
        if isinstance(item, Ended) and item.reason != "cancelled":
            return item
    raise ApiError(503, "The second decoding was stopped before its end.")


def _decoded(ended: Ended) -> Decoded:
    return Decoded(ended.response.tokens, ended.stop, ended.reason)
