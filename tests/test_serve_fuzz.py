"""Every route of the OpenAPI document with data that fits it and data that does not: never a 5xx."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from serve_fakes import FakeEngine, app_for, call, live

from forerun.serve.settings import ServeSettings

ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/v1/models/{model}",
)


@pytest.fixture(scope="module")
def app() -> Any:
    return app_for(FakeEngine(say=lambda work: "ok"), ServeSettings(ping=1.0))


@pytest.fixture(scope="module")
def address(app: Any) -> Iterator[str]:
    with live(app) as address:
        yield address


def fuzz(app: Any, address: str, path: str, examples: int, mode: GenerationMode) -> set[int]:
    """The statuses that came."""
    schema = schemathesis.openapi.from_dict(app.openapi())
    method = "GET" if "{" in path else "POST"
    operation = schema[path][method]
    statuses: set[int] = set()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def run(case: Any) -> None:
        where = case.formatted_path
        body = None if method == "GET" else case.body
        try:
            reply = call(address, where, body, method=method)
        except (TypeError, UnicodeEncodeError, ValueError):
            return  # it cannot be sent as JSON, or not as a path
        assert reply.status < 500, (where, body, reply.text)
        assert reply.status == 200 or "error" in reply.json, "errors have a body that says so"
        statuses.add(reply.status)

    run()
    return statuses


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/detokenize"])
def test_a_little(app: Any, address: str, path: str) -> None:
    """Most of the time goes into making up data: the larger bodies are for the long test."""
    assert fuzz(app, address, path, 8, GenerationMode.POSITIVE)
    assert fuzz(app, address, path, 8, GenerationMode.NEGATIVE) <= {400, 404, 422}


@pytest.mark.long
@pytest.mark.parametrize("path", ROUTES)
def test_much_of_everything(app: Any, address: str, path: str) -> None:
    assert fuzz(app, address, path, 150, GenerationMode.POSITIVE)
    if "{" not in path:  # any text is a name
        assert fuzz(app, address, path, 150, GenerationMode.NEGATIVE)
