"""Errors as clients know them: OpenAI's form, and Anthropic's under /v1/messages. No paths, addresses or tracebacks."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.serve.errors import ApiError, bad_request
from forerun.serve.request_ids import request_id

log = logging.getLogger("forerun")

UNEXPECTED = "The server failed to answer this request."
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Better words than FastAPI's, by its own.
HTTP_MESSAGES = {
    "Not Found": "There is nothing at this address.",
    "Method Not Allowed": "This address does not take that method.",
    "There was an error parsing the body": "The body cannot be read: send JSON in UTF-8, not too deeply nested.",
}


def openai_body(error: ApiError) -> dict[str, Any]:
    """With numbers, such as the prompt's length, beside the message."""
    code: str | int | None = 503 if error.status == 503 else error.code
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": code, **error.facts}}


def anthropic_body(error: ApiError, named: str) -> dict[str, Any]:
    """`/v1/messages` and all below; `named`: the request's id."""
    kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message, facts = error.message, error.facts
    if error.code == "context_length_exceeded" and {"n_prompt_tokens", "n_ctx"} <= facts.keys():
        # Anthropic's own words: Claude Code looks for them, and shortens the conversation.
        message = f"prompt is too long: {facts['n_prompt_tokens']} tokens > {facts['n_ctx']} maximum"
    return {"type": "error", "error": {"type": kind, "message": message, **facts}, "request_id": named}


def error_response(scope: Scope, error: ApiError) -> Response:
    """In the form that belongs to the path."""
    anthropic = scope["path"].startswith("/v1/messages")
    body = anthropic_body(error, request_id(scope)) if anthropic else openai_body(error)
    return JSONResponse(body, error.status, headers=error.headers)


def as_api_error(error: Exception) -> ApiError:
    """What was not foreseen is for the log; the client learns that it happened."""
    if isinstance(error, ApiError):
        return error
    log.error("a request failed", exc_info=error)
    return ApiError(500, UNEXPECTED)


def validation_error(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong, and where. Of several forms that a field may have, the one that came closest."""
    errors = error.errors()
    first = max(
        (e for e in errors if e["loc"][:2] == errors[0]["loc"][:2]),
        key=lambda e: (len(e["loc"]), e["type"] == "union_tag_invalid"),  # an object came, of a kind that is not known
    )
    place = [part for part in first["loc"] if part != "body"]
    kind = first["type"]
    if kind == "json_invalid":
        return bad_request("The body is not valid JSON.", code="invalid_json")
    param = _param(place, error.body, missing=kind == "missing")
    if kind == "extra_forbidden":
        name = param or str(place[-1])[:100]
        return bad_request(f"'{name}' is not supported.", name, "unknown_parameter")
    if not place and kind == "value_error":  # a rule of our own for the whole body, which says what is wrong
        return bad_request(str(first["ctx"]["error"]))
    if not place:
        return bad_request("The body must be a JSON object, sent as application/json.")
    if kind == "union_tag_invalid":  # tags of our own have a second word, and there may be too many to list
        return bad_request(
            f"Invalid '{param}': '{first['ctx']['tag'].split(' ')[0][:60]}' is not known here.", param, "invalid_value"
        )
    return bad_request(f"Invalid '{param}': {first['msg']}.", param, "invalid_value")


def _param(place: list[Any], body: Any, *, missing: bool) -> str:
    """messages[3].content: as OpenAI writes it, without the names of union members that pydantic adds."""
    text = ""
    for number, part in enumerate(place, start=1):
        if isinstance(part, int):
            text += f"[{part}]"
            body = body[part] if isinstance(body, list) and part < len(body) else None
        elif _is_tag(place[number - 1 :], body, missing):
            continue
        elif isinstance(body, dict) and (part in body or (missing and number == len(place))):
            text += (f".{part}" if text else part) if part.isidentifier() else ""
            body = body.get(part)
    return text[:200]


def _is_tag(place: list[Any], body: Any, missing: bool) -> bool:
    """Is the first part the type of the object, and no field of that name, under which there is what comes next?"""
    if not isinstance(body, dict) or body.get("type") != place[0] or len(place) == 1:
        return False
    under = body.get(place[0])
    return not isinstance(under, dict) or (place[1] in under) == (missing and len(place) == 2)


def add_error_handlers(app: FastAPI) -> None:
    """All ways a request can fail that are foreseen."""

    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> Response:
        return error_response(request.scope, error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(request.scope, validation_error(error))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        message = HTTP_MESSAGES.get(error.detail, error.detail)
        return error_response(request.scope, ApiError(error.status_code, message, headers=error.headers))


class CatchAll:
    """ASGI middleware, the innermost: what no handler knows becomes a 500, and is logged once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            await error_response(scope, as_api_error(error))(scope, receive, send)
