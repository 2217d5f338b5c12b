"""Who may talk to the server: keys, hosts, web pages, odd paths, and what errors give away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from serve_fakes import FakeEngine, app_for, call, live

from forerun.serve import security
from forerun.serve.settings import ServeSettings

KEY = "sk-a-very-secret-key"
SETTINGS = ServeSettings(
    api_key=KEY, allowed_hosts=("models.example",), allowed_origins=("https://app.example",), max_body=100_000
)
BODY = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def app() -> Any:
    return app_for(FakeEngine(), SETTINGS)


@pytest.fixture(scope="module")
def address(app: Any) -> Iterator[str]:
    with live(app) as address:
        yield address


def addresses(app: Any) -> list[tuple[str, str]]:
    """Every method and path that the application knows, parameters filled in."""
    # Newer versions of FastAPI keep a router that was included as it is.
    routes = [inner for r in app.router.routes for inner in getattr(getattr(r, "original_router", None), "routes", [r])]
    found = [
        (method, route.path.replace("{model:path}", "tiny").replace("{name:path}", "missing.js"))
        for route in routes
        for method in route.methods
    ]
    assert len(found) > 15
    return found


def test_every_route_needs_the_key_but_health_and_the_page(app: Any, address: str) -> None:
    closed = 0
    for method, path in addresses(app):
        for odd in (path, "/" + path, path + "/", path.replace("/", "/%2e/", 1), path + "%00", path + "?key=" + KEY):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"x-api-key": "wrong"}):
                body = BODY if method == "POST" else None
                reply = call(address, odd, body, method=method, headers=headers)
                if reply.status == 401:
                    closed += 1
                    assert reply.headers["www-authenticate"] == "Bearer"
                else:
                    assert odd.split("?")[0] in ("/health", "/v1/health", "/ready", "/"), (method, odd, reply.status)
    assert closed > 200


def test_both_ways_to_send_the_key(address: str) -> None:
    for headers in ({"Authorization": f"Bearer {KEY}"}, {"authorization": f"bearer {KEY}"}, {"x-api-key": KEY}):
        assert call(address, "/v1/models", headers=headers).status == 200
    for wrong in (KEY[:-1], KEY + "x", "", "é", KEY.upper()):
        headers = {"Authorization": f"Bearer {wrong}".encode("latin-1").decode("latin-1")}
        assert call(address, "/v1/models", headers=headers).status == 401


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    compared = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((len(left), len(right)))
        return left == right

    monkeypatch.setattr(security.hmac, "compare_digest", compare)
    for key in ("", "short", KEY, "x" * 1000):
        call(address, "/v1/models", headers={"x-api-key": key})
    assert compared == [(32, 32)] * 4, "digests of one length, not the keys"


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1", 200), ("localhost:8000", 200), ("[::1]:9", 200), ("models.example", 200), ("MODELS.example", 200),
     ("evil.example", 403), ("127.0.0.1.evil.example", 403), ("localhost.evil.example", 403), ("", 403),
     ("192.168.1.5", 403), ("models.example.evil", 403), ("127.0.0.1@evil.example", 403)],
)  # fmt: skip
def test_foreign_hosts_are_refused(address: str, host: str, status: int) -> None:
    assert call(address, "/health", headers={"Host": host}).status == status
    headers = {"Host": host, "Authorization": f"Bearer {KEY}"}
    assert call(address, "/v1/chat/completions", BODY, headers=headers).status == status


def test_any_address_serves_when_all_are_listened_on() -> None:
    with live(app_for(FakeEngine(), ServeSettings(host="0.0.0.0", api_key=KEY))) as address:
        for host, status in (("192.168.1.5:8000", 200), ("[fe80::1]", 200), ("evil.example", 403)):
            assert call(address, "/health", headers={"Host": host}).status == status


def test_foreign_web_pages_are_refused(address: str) -> None:
    key = {"Authorization": f"Bearer {KEY}"}
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://app.example", "https://app.example.x"):
        reply = call(address, "/v1/chat/completions", BODY, headers=key | {"Origin": origin})
        assert reply.status == 403
        assert "access-control-allow-origin" not in reply.headers
    own = address  # what the page itself sends
    reply = call(address, "/v1/chat/completions", BODY, headers=key | {"Origin": own})
    assert reply.status == 200
    assert "access-control-allow-origin" not in reply.headers


def test_pages_that_are_allowed_get_cors(address: str) -> None:
    origin = {"Origin": "https://app.example"}
    asked = origin | {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x<script>",
    }
    preflight = call(address, "/v1/chat/completions", method="OPTIONS", headers=asked)
    assert preflight.status == 204
    assert preflight.headers["access-control-allow-origin"] == "https://app.example"
    assert preflight.headers["access-control-allow-headers"] == "authorization, content-type"
    assert preflight.headers["vary"] == "Origin"
    reply = call(address, "/v1/models", headers=origin | {"Authorization": f"Bearer {KEY}"})
    assert reply.headers["access-control-allow-origin"] == "https://app.example"
    denied = call(address, "/v1/models", headers=origin)
    assert (denied.status, denied.headers["access-control-allow-origin"]) == (401, "https://app.example")


def test_a_host_that_is_allowed_is_allowed_on_all_its_ports() -> None:
    settings = ServeSettings(allowed_origins=("localhost", "app.example:81", "https://one.example"))
    with live(app_for(FakeEngine(), settings)) as address:
        local = ("http://localhost:3000", "https://localhost", "http://127.0.0.1:8080", "http://[::1]:3000")
        for origin in (*local, "http://app.example:81", "https://one.example"):
            reply = call(address, "/v1/models", headers={"Origin": origin})
            assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, origin)
        for origin in ("http://localhost.evil", "http://app.example", "http://one.example", "null", "http://[::2]"):
            assert call(address, "/v1/models", headers={"Origin": origin}).status == 403


def test_too_many_and_too_long_headers(address: str) -> None:
    assert call(address, "/health", headers={f"X-{n}": "y" for n in range(300)}).status == 431
    assert call(address, "/health", headers={"X-Long": "y" * 40_000}).status == 431


def test_errors_have_the_form_of_their_dialect_and_say_nothing_else(address: str) -> None:
    openai = call(address, "/nothing")
    assert (openai.status, openai.error["type"]) == (401, "authentication_error")
    anthropic = call(address, "/v1/messages", {})
    assert anthropic.json["type"] == "error"
    assert anthropic.error["type"] == "authentication_error"
    too_large = call(address, "/v1/messages", "", headers={"x-api-key": KEY, "Content-Length": str(1 << 40)})
    assert too_large.error["type"] == "request_too_large"
    invalid = call(address, "/v1/messages", {}, headers={"x-api-key": KEY})
    for reply in (anthropic, too_large, invalid):  # Anthropic's client looks for the id under that name
        assert reply.json["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    missing = call(address, "/etc/passwd", headers={"x-api-key": KEY})
    assert missing.json == {
        "error": {
            "message": "There is nothing at this address.",
            "type": "not_found_error",
            "param": None,
            "code": None,
        }
    }
