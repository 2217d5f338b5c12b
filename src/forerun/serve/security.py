"""Who may talk to the server: the right Host, no foreign web page, and the key. Everything is closed unless listed."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Collection
from contextvars import ContextVar

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.serve.error_bodies import error_response
from forerun.serve.errors import ApiError
from forerun.serve.settings import ServeSettings

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
WILDCARDS = frozenset({"0.0.0.0", "::"})
MAX_HEADERS, MAX_HEADER_BYTES = 100, 32 << 10
# The key that the request being served came with: whoever has another one learns nothing of what it asks.
CALLER: ContextVar[bytes] = ContextVar("caller", default=b"")
HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^:@/\[\]]+))(?::[0-9]{0,5})?")
EXPOSED = "X-Request-Id, X-Forerun-Warning, Retry-After"


class AccessControl:
    """ASGI middleware. `open_paths` need no key: the health check and the page's own files, by their exact names."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, open_paths: Collection[str]) -> None:
        self._app, self._open_paths = app, frozenset(open_paths)
        self._key = None if settings.api_key is None else _digest(settings.api_key.encode())
        self._hosts = LOOPBACK_NAMES | {settings.host.lower()} | {host.lower() for host in settings.allowed_hosts}
        self._any_address = settings.host in WILDCARDS
        origins = frozenset(origin.lower().rstrip("/") for origin in settings.allowed_origins)
        self._origins = origins | LOOPBACK_NAMES if "localhost" in origins else origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            foreign = self._checked_origin(scope)
            if foreign is not None:
                send = _with_cors(send, foreign)
                if scope["method"] == "OPTIONS":
                    await _preflight(scope)(scope, receive, send)
                    return
            CALLER.set(self._checked_key(scope))
        except ApiError as error:
            await error_response(scope, error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _checked_origin(self, scope: Scope) -> str | None:
        """The foreign page that asks and may do so; None: no page, or our own."""
        _check_size(scope)
        host = _only(scope, b"host").lower()
        if not self._known(_name(host)):
            raise ApiError(403, "This host name is not served here; --allowed-hosts adds names.")
        origin = _only(scope, b"origin").lower()
        if not origin or origin in (f"http://{host}", f"https://{host}"):
            return None
        if not {origin, origin.partition("://")[2], _name(origin.partition("://")[2]), "*"} & self._origins:
            raise ApiError(403, "This web page may not call the server; --allowed-origins adds pages.")
        return origin

    def _known(self, name: str) -> bool:
        """A page on another name that points here must not get in. With an address for a name, it is our own page."""
        return name in self._hosts or "*" in self._hosts or (self._any_address and _is_address(name))

    def _checked_key(self, scope: Scope) -> bytes:
        """What it came with, where keys do not count or an address is open too."""
        scheme, _, token = _only(scope, b"authorization").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else _only(scope, b"x-api-key")
        if self._key is None or scope["path"] in self._open_paths:
            return given.encode("latin-1")
        if not hmac.compare_digest(_digest(given.encode("latin-1")), self._key):
            raise ApiError(
                401,
                "A valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return given.encode("latin-1")


def callers_salt(wanted: str) -> str:
    """What keeps the cached texts of whoever asks apart from those of others. `wanted`: of the request."""
    caller = CALLER.get()
    return f"{_digest(caller).hex() if caller else ''} {wanted}" if caller or wanted else ""


def _digest(key: bytes) -> bytes:
    """Of equal length for all keys, so that the comparison tells nothing of it."""
    return hashlib.sha256(key).digest()


def _check_size(scope: Scope) -> None:
    headers = scope["headers"]
    if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
        raise ApiError(431, "The request has too many or too long headers.")


def _only(scope: Scope, name: bytes) -> str:
    """The value of a header that may come once; empty where there is none."""
    values = [value for key, value in scope["headers"] if key == name]
    if len(values) > 1:
        raise ApiError(400, f"The header '{name.decode()}' came more than once.")
    return values[0].decode("latin-1") if values else ""


def _name(host: str) -> str:
    """Without the port, and without the brackets of an IPv6 address; what is neither has no name."""
    found = HOST.fullmatch(host)
    return (found["address"] or found["name"]) if found else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _with_cors(send: Send, origin: str) -> Send:
    async def send_allowed(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = EXPOSED
            headers.add_vary_header("Origin")
        await send(message)

    return send_allowed


def _preflight(scope: Scope) -> Response:
    """A browser asks first; the answer says nothing about what is there."""
    wanted = _only(scope, b"access-control-request-headers")
    plain = ", ".join(
        name for part in wanted.split(",")[:50] if (name := part.strip().lower()).replace("-", "").isalnum()
    )
    headers = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Max-Age": "600"}
    return Response(status_code=204, headers=headers | ({"Access-Control-Allow-Headers": plain} if plain else {}))
