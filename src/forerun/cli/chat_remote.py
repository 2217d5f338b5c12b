"""`forerun chat --url`: a server answers, over its OpenAI-compatible stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from types import MappingProxyType
from typing import Any

from forerun.bench.http_client import Address, complaint, events
from forerun.cli.chat_media import sent_content
from forerun.cli.chat_talkers import ReplyPiece, ReplySummary
from forerun.errors import ForerunError
from forerun.media.parts import Kind
from forerun.options import GenerationOptions
from forerun.text.messages import Message

CONNECT_SECONDS = 600.0  # a prompt may take long to read; a server that is gone refuses at once
LOCAL_ONLY = ("raw", "lang_bias", "suppress")  # what a request over HTTP has no field for
SPECULATIVE = ("draft", "draft_tokens", "accept", "prove")
SENT = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")


class RemoteTalker:
    """A server at an address such as http://127.0.0.1:8000, with or without /v1."""

    defaults: Mapping[str, float] = MappingProxyType({"temperature": 1.0})  # OpenAI's, unless the server has its own

    def __init__(self, url: str, api_key: str | None) -> None:
        self._server = Address.of(url, api_key)
        self._address = f"http{'s' if self._server.secure else ''}://{self._server.netloc}"
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        try:
            self.name = str(json.loads(self._ask("GET", "/models").read())["data"][0]["id"])
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
            raise ForerunError(f"{self._address} lists no models: is it a server for OpenAI's clients?") from error

    def check(self, options: GenerationOptions) -> None:
        options.sampling()
        for entry in fields(options):
            if entry.name in LOCAL_ONLY and getattr(options, entry.name) != entry.default:
                raise ForerunError(f"{entry.name} cannot be sent to a server: drop it, or chat without --url")

    def check_media(self, kind: Kind) -> None:
        """The server says so when it is asked."""

    def answer(self, messages: Sequence[Message], options: GenerationOptions) -> RemoteReply:
        self.check(options)
        return RemoteReply(self._ask("POST", "/chat/completions", self._body(messages, options)))

    def _body(self, messages: Sequence[Message], options: GenerationOptions) -> dict[str, Any]:
        """What is not set is as the server likes it."""
        defaults = GenerationOptions()
        body: dict[str, Any] = {
            "model": self.name,
            "messages": [{**message, "content": sent_content(message["content"])} for message in messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_details": True,
        }
        body |= {name: getattr(options, name) for name in SENT if getattr(options, name) != getattr(defaults, name)}
        if options.max_tokens is not None:
            body["max_completion_tokens"] = options.max_tokens
        if options.stops:
            body["stop"] = list(options.stops)
        if options.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in options.logit_bias.items()}
        wishes = {name: getattr(options, name) for name in SPECULATIVE}
        if wishes != {name: getattr(defaults, name) for name in SPECULATIVE}:
            depth = {} if options.draft_tokens == "auto" else {"depth": options.draft_tokens}
            changed = {name: wishes[name] for name in ("accept", "prove") if wishes[name] != getattr(defaults, name)}
            body["speculative"] = {"draft": options.draft, **depth, **changed}
        return body

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> HTTPResponse:
        """A response whose status is good; anything else is one line."""
        server = self._server
        kind = HTTPSConnection if server.secure else HTTPConnection
        connection = kind(server.host, server.port, timeout=CONNECT_SECONDS)
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, f"{server.path}/v1{path}", data, self._headers)
            response = connection.getresponse()
        except (OSError, HTTPException) as error:
            raise ForerunError(f"no answer from {self._address}: {error or type(error).__name__}") from error
        if response.status != 200:
            raise ForerunError(f"{self._address} answers {response.status}: {complaint(response.read())}")
        return response


class RemoteReply:
    """A stream of chunks."""

    def __init__(self, response: HTTPResponse) -> None:
        self._response = response
        self._summary: dict[str, Any] = {}
        self._pieces, self._cut = 0, False

    def __iter__(self) -> Iterator[ReplyPiece]:
        for event in events(self._response):
            for name in ("usage", "forerun"):
                if event.get(name) is not None:
                    self._summary[name] = event[name]
            for choice in event.get("choices") or ():
                self._cut = self._cut or choice.get("finish_reason") == "length"
                for piece in pieces(choice):
                    self._pieces += 1
                    yield piece

    def rest(self) -> Iterator[ReplyPiece]:
        """What the server has sent and nobody has read is not worth waiting for."""
        return iter(())

    def summary(self) -> ReplySummary:
        own: dict[str, Any] = self._summary.get("forerun") or {}
        usage: dict[str, Any] = self._summary.get("usage") or {}
        return ReplySummary(
            tokens=usage.get("completion_tokens", self._pieces),
            tokens_per_second=own.get("tokens_per_second"),
            tokens_per_round=own.get("tokens_per_round"),
            seconds_saved=own.get("seconds_saved"),
            seed=own.get("seed"),
            guaranteed=None if own.get("accept") == "rejection" else own.get("guaranteed"),
            length=self._cut,
            warnings=own.get("warnings", []),
            proof=proof_line(own["proof"]) if own.get("proof") else None,
            prompt_tokens=usage.get("prompt_tokens", 0),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        )

    def close(self) -> None:
        self._response.close()  # the server notices and stops the work


def proof_line(sent: Mapping[str, Any]) -> str:
    """As for an answer of this process."""
    from forerun.proof import Proof

    return Proof(**sent).line()


def pieces(choice: Mapping[str, Any]) -> Iterator[ReplyPiece]:
    """Of one choice of a chunk. The tokens of a chunk come with where they are from."""
    delta = choice.get("delta") or {}
    thought = delta.get("reasoning_content") or delta.get("reasoning")
    if thought:
        yield ReplyPiece(thought, thought=True)
    content = delta.get("content")
    if not content:
        return
    tokens = [token for token in choice.get("token_details") or () if token.get("text")]
    if "".join(token["text"] for token in tokens) == content:
        for token in tokens:
            yield ReplyPiece(token["text"], _drafter(token))
    else:  # text that was held back, or tokens that share a character
        arms = {_drafter(token) for token in tokens}
        yield ReplyPiece(content, arms.pop() if len(arms) == 1 else "")


def _drafter(token: Mapping[str, Any]) -> str:
    """Who drafted a token; nobody, where the model itself chose it."""
    source = str(token.get("source", ""))
    return {"model": "", "draft model": "model"}.get(source, source)
