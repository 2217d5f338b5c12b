"""`forerun chat --url` against a small server of its own: what is sent, what is read, what goes wrong."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from forerun.cli.chat_remote import RemoteTalker, pieces
from forerun.cli.chat_talkers import ReplyPiece
from forerun.cli.main import main
from forerun.errors import ForerunError
from forerun.options import GenerationOptions

DETAILS = [{"text": "Hel", "source": "model", "round": 0}, {"text": "lo", "source": "mtp", "round": 1}]
USER = [{"role": "user", "content": "hi"}]
OWN = {"tokens_per_second": 50.0, "tokens_per_round": 2.5, "seconds_saved": 0.5, "seed": 3, "guaranteed": True}


class FakeServer(ThreadingHTTPServer):
    """Answers with a fixed stream and keeps what it was sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.key: str | None = None
        self.models = b'{"data": [{"id": "tiny"}]}'
        self.lines = stream_of(
            chunk({"role": "assistant", "content": ""}),
            chunk({"reasoning_content": "hm"}),
            chunk({"content": "Hello"}, token_details=DETAILS),
            chunk({"content": " you"}, finish_reason=None),
            chunk({}, finish_reason="length"),
            {"choices": [], "usage": {"completion_tokens": 7}, "forerun": OWN},
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self._send("application/json", self.server.models)

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._send("text/event-stream", self.server.lines)

    def _send(self, kind: str, data: bytes) -> None:
        key = self.headers.get("Authorization")
        self.server.keys.append(key)
        if self.server.key is not None and key != f"Bearer {self.server.key}":
            self.send_response(401)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "Wrong key.", "type": "authentication_error"}}')
            return
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def chunk(delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason, **more}], "usage": None}


def stream_of(*events: dict[str, Any]) -> bytes:
    lines = [b": ping\n\n", *(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)]
    return b"".join([*lines, b"data: [DONE]\n\n"])


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_an_answer_comes_in_pieces(server: FakeServer) -> None:
    talker = RemoteTalker(server.url + "/v1/", None)
    assert talker.name == "tiny"
    with closing(talker.answer(USER, GenerationOptions())) as reply:
        assert list(reply) == [
            ReplyPiece("hm", thought=True),
            ReplyPiece("Hel"),
            ReplyPiece("lo", "mtp"),
            ReplyPiece(" you"),
        ]
        summary = reply.summary()
    assert (summary.tokens, summary.tokens_per_second, summary.tokens_per_round) == (7, 50.0, 2.5)
    assert (summary.seconds_saved, summary.seed, summary.guaranteed, summary.length) == (0.5, 3, True, True)
    (body,) = server.bodies
    assert body["messages"] == USER and body["stream"] is True
    assert {"speculative", "temperature", "top_p"}.isdisjoint(body)  # what is not set is as the server likes it
    assert server.keys == [None, None]


def test_options_have_their_fields(server: FakeServer) -> None:
    talker = RemoteTalker(server.url, "key")
    options = GenerationOptions(
        max_tokens=5, temperature=0.7, top_p=0.9, seed=1, stop="END", draft="mtp", draft_tokens=3, logit_bias={7: -1.0}
    )
    with closing(talker.answer(USER, options)):
        pass
    (body,) = server.bodies
    assert body["max_completion_tokens"] == 5 and body["temperature"] == 0.7 and body["top_p"] == 0.9
    assert body["seed"] == 1 and body["stop"] == ["END"] and body["logit_bias"] == {"7": -1.0}
    assert body["speculative"] == {"draft": "mtp", "depth": 3} and server.keys == ["Bearer key"] * 2
    proved = OWN | {"proof": {"identical": True, "tokens": 7}}
    server.lines = stream_of({"choices": [], "usage": {"completion_tokens": 7}, "forerun": proved})
    with closing(talker.answer(USER, GenerationOptions(prove=True))) as reply:
        assert not list(reply) and reply.summary().proof == "proved: 7 tokens identical to plain decoding"
    assert server.bodies[-1]["speculative"] == {"draft": "auto", "prove": True}
    with closing(talker.answer(USER, GenerationOptions(accept="rejection"))):
        assert server.bodies[-1]["speculative"] == {"draft": "auto", "accept": "rejection"}
    for refused in (GenerationOptions(suppress=[1]), GenerationOptions(lang_bias="ja=-5")):
        with pytest.raises(ForerunError, match="cannot be sent"):
            talker.answer(USER, refused)


def test_files_are_sent_inside_the_request(server: FakeServer, tmp_path: Path) -> None:
    talker = RemoteTalker(server.url, None)
    names = {"image": "cat.jpg", "video": "film.webm", "audio": "talk.wav"}
    for name in (*names.values(), "talk.flac", "odd"):
        (tmp_path / name).write_bytes(b"a")
    parts = [{"type": kind, "path": str(tmp_path / name)} for kind, name in names.items()]
    parts += [{"type": "audio", "path": str(tmp_path / "talk.flac")}, {"type": "image", "path": str(tmp_path / "odd")}]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}, *USER]
    with closing(talker.answer(messages, GenerationOptions())):
        pass
    assert server.bodies[0]["messages"] == [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,YQ=="}},
                {"type": "video_url", "video_url": {"url": "data:video/webm;base64,YQ=="}},
                {"type": "input_audio", "input_audio": {"data": "YQ==", "format": "wav"}},
                {"type": "audio_url", "audio_url": {"url": "data:audio/flac;base64,YQ=="}},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,YQ=="}},
                {"type": "text", "text": "What?"},
            ],
        },
        *USER,
    ]
    talker.check_media("image")  # whether it sees is the server's to say
    (tmp_path / "cat.jpg").unlink()
    with pytest.raises(ForerunError, match="cannot read the image"):
        talker.answer(messages, GenerationOptions())


def test_what_goes_wrong_is_one_line(server: FakeServer) -> None:
    server.key = "right"
    with pytest.raises(ForerunError, match=r"answers 401: Wrong key\."):
        RemoteTalker(server.url, None)
    talker = RemoteTalker(server.url, "right")
    server.lines = stream_of(chunk({"content": "So"}), {"error": {"message": "out of memory"}})
    with closing(talker.answer(USER, GenerationOptions())) as reply, pytest.raises(ForerunError, match="out of memory"):
        list(reply)
    server.lines = b"data: {not json\n\n"
    with (
        closing(talker.answer(USER, GenerationOptions())) as reply,
        pytest.raises(ForerunError, match="the connection broke"),
    ):
        list(reply)
    for url in ("127.0.0.1:8000", "ftp://x", "http://", "x", "http://x:99999", "http://x:port", "http://[::1"):
        with pytest.raises(ForerunError, match="--url"):
            RemoteTalker(url, None)
    for key in ("clé€", "a\nb"):
        with pytest.raises(ForerunError, match="key must be printable ASCII"):
            RemoteTalker(server.url, key)
    with pytest.raises(ForerunError, match=r"no answer from http://127\.0\.0\.1:1"):
        RemoteTalker("http://127.0.0.1:1", None)


def test_the_command_line(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORERUN_API_KEY", "right")
    server.key = "right"
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n/stats\nmore\n"))
    assert main(["chat", "--url", server.url, "--temp", "0.5"]) == 0
    out, err = capsys.readouterr()
    assert out == "Hello you\nHello you\n" and "1 answer · 7 tokens" in err and "2.50 tokens/round" in err
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["hi", "Hello you", "more"]
    for more in (["smollm2"], ["--device", "cpu"], ["--max-context", "9"]):
        assert main(["chat", "--url", server.url, *more]) == 2
        assert "the server has its model already" in capsys.readouterr().err


def test_text_whose_tokens_do_not_add_up_is_shown_as_it_is() -> None:
    split = [{"text": "\ufffd", "source": "mtp"}, {"text": "\ufffd", "source": "mtp"}]
    assert list(pieces({"delta": {"content": "é"}, "token_details": split})) == [ReplyPiece("é", "mtp")]
    assert list(pieces({"delta": {"content": "é"}, "token_details": [*split, {"text": "", "source": "lookup"}]})) == [
        ReplyPiece("é", "mtp")
    ]
    assert list(pieces({"delta": {"content": None}})) == []


@pytest.mark.parametrize("models", [b"<html>", b"{}", b"[]", b'{"data": []}', b'{"data": null}', b"\xff"])
def test_an_address_that_is_something_else_is_one_line(server: FakeServer, models: bytes) -> None:
    """It was a traceback."""
    server.models = models
    with pytest.raises(ForerunError, match="lists no models"):
        RemoteTalker(server.url, None)


def test_an_answer_that_breaks_off_is_not_taken_for_whole(server: FakeServer) -> None:
    server.lines = server.lines.partition(b"data: [DONE]")[0]
    reply = RemoteTalker(server.url, None).answer(USER, GenerationOptions())
    with pytest.raises(ForerunError, match="in the middle of the answer"), closing(reply):
        list(reply)
