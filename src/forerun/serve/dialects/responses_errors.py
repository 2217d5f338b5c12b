"""Errors in the form of OpenAI's API."""

from __future__ import annotations

from typing import Any

from forerun.serve.errors import ApiError


def openai_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """The body of an error before anything was streamed. The id goes into a header, which is the app's business."""
    del request_id
    said = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return {"error": {**said, **error.facts}}


def failure(error: ApiError) -> dict[str, Any]:
    """The error of a response that had begun. Clients decide by the code whether to try again."""
    if error.status == 429:
        code = "rate_limit_exceeded"
    elif error.status >= 500:
        code = "server_error"
    else:
        code = error.code or "invalid_prompt"
    return {"code": code, "message": error.message}
