"""Errors that a client gets: a status, one line, and the parameter that was wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """Turned into each dialect's own form by the routes."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        **facts: int,
    ) -> None:
        """`facts`: numbers beside the message, such as n_prompt_tokens and n_ctx."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers, self.facts = dict(headers or {}), facts

    def __reduce__(self) -> tuple[Any, ...]:
        """It may come from another process."""
        return _again, (self.status, self.message, self.param, self.code, self.headers, self.facts)

    @property
    def type(self) -> str:
        """OpenAI's word for the kind of error."""
        words = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        if self.status == 503:
            return "unavailable_error"
        return words.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")


def _again(
    status: int, message: str, param: str | None, code: str | None, headers: dict[str, str], facts: dict[str, int]
) -> ApiError:
    return ApiError(status, message, param=param, code=code, headers=headers, **facts)


def try_later(status: int, message: str, code: str | None = None, seconds: int = 5) -> ApiError:
    """A request that could be served at another time: 429 or 503. Clients wait so long before they send it again."""
    return ApiError(status, message, code=code, headers={"Retry-After": str(seconds)})


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be served as it is."""
    return ApiError(400, message, param=param, code=code)
