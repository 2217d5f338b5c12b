"""Errors in the form of Anthropic's API."""

from __future__ import annotations

from typing import Any

from forerun.serve.errors import ApiError

WORDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def anthropic_error(error: ApiError, request_id: str | None) -> dict[str, Any]:
    """The body of an error, and the data of an error event."""
    kind = WORDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    said = {"type": kind, "message": error.message, **error.facts}
    return {"type": "error", "error": said, "request_id": request_id}
