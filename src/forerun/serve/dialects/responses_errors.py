"""What went wrong with a response that had begun."""

from __future__ import annotations

from typing import Any

from forerun.serve.errors import ApiError


def failure(error: ApiError) -> dict[str, Any]:
    """In the words of the Responses API. Clients decide by the code whether to try again."""
    if error.status == 429:
        code = "rate_limit_exceeded"
    elif error.status >= 500:
        code = "server_error"
    else:
        code = error.code or "invalid_prompt"
    return {"code": code, "message": error.message}
