"""Chat completions by the official client, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from serve_fakes import FakeEngine, app_for, live

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with live(app_for(engine)) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def test_whole_and_streamed_answers_are_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content == "Hello there, world."
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello there, world."
    assert chunks[-1].usage == whole.usage
