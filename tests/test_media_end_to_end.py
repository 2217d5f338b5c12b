"""Tiny models that see and hear, from the command line, the library and official clients: the same answers."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from media_files import encoded, picture
from seeing import seeing_gemma, seeing_qwen
from serve_fakes import call, live, until

import forerun
from forerun.cli.main import main
from forerun.errors import ForerunError
from forerun.language_model import LanguageModel
from forerun.serve.app import create_app
from forerun.serve.local_engine import LocalEngine
from forerun.serve.model_service import ModelService, loaded_model
from forerun.serve.settings import ServeSettings

CAT, DOG = encoded(picture(seed=1)), encoded(picture(seed=2))
ASKED = "What is this?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = seeing_gemma(tmp_path_factory.mktemp("gemma"))
    (folder / "cat.png").write_bytes(CAT)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> LanguageModel:
    return forerun.load(str(folder), dtype="float32", max_context=600)


def answer(model: LanguageModel, **options: Any) -> forerun.response.Response:
    return forerun.generate(model, ASKED, **{"max_tokens": 12, "draft": "off", **options})


def test_the_library(model: LanguageModel, folder: Path) -> None:
    cat = answer(model, images=[folder / "cat.png"])
    assert answer(model, images=[picture(seed=1)]).tokens == cat.tokens, "the same pixels"
    assert answer(model, images=[DOG]).tokens != cat.tokens
    assert answer(model, images=[CAT], draft="lookup", draft_tokens=4).tokens == cat.tokens
    everything: dict[str, Any] = {"images": [CAT], "videos": [folder / "talk.mp4"], "audio": [folder / "talk.wav"]}
    plain = answer(model, **everything, temperature=0.8, seed=3)
    assert plain.prompt_tokens > 100
    assert answer(model, **everything, temperature=0.8, seed=3, draft="lookup", draft_tokens=3).tokens == plain.tokens
    for bad in (b"GIF89a but no picture", b"nothing", CAT[:60]):
        with pytest.raises(ForerunError, match=r"^image 1 is"):
            answer(model, images=[bad])
    assert not model.engine.scheduler.active


def test_the_command_line(model: LanguageModel, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["generate", "-m", str(folder), "-p", ASKED, "-n", "12", "--dtype", "float32", "--max-context", "600"]
    seen = ["--image", str(folder / "cat.png"), "--audio", str(folder / "talk.wav")]
    assert main([*flags, *seen, "--json", "--draft", "off"]) == 0
    wanted = answer(model, images=[CAT], audio=[folder / "talk.wav"])
    assert json.loads(capsys.readouterr().out)["tokens"] == wanted.tokens
    (folder / "bad.png").write_bytes(b"nothing")
    assert main([*flags, "--image", str(folder / "bad.png"), "--quiet"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "bad.png is not a picture" in said


def test_another_family(tmp_path: Path) -> None:
    """Qwen3.5 sees, with positions of its own; templates put marks around its placeholders."""
    model = forerun.load(str(seeing_qwen(tmp_path)), dtype="float32", max_context=600)
    photo, film = tmp_path / "photo.jpg", tmp_path / "talk.mp4"
    first = [{"type": "image", "path": photo}, {"type": "text", "text": "What?"}, {"type": "video", "path": film}]
    turns = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Sure?"},
    ]

    def ask(draft: str, **options: Any) -> list[int]:
        return forerun.generate(model, turns, max_tokens=12, draft=draft, **options).tokens

    plain = ask("off")
    for draft, options in (("lookup", {"draft_tokens": 3}), ("auto", {})):
        assert ask(draft, **options) == plain
    assert ask("lookup", temperature=0.9, seed=2) == ask("off", temperature=0.9, seed=2)
    shown = [forerun.generate(model, "What?", images=[data], max_tokens=8, draft="off").tokens for data in (CAT, DOG)]
    assert shown[0] != shown[1]
    with pytest.raises(ForerunError, match="reads text, images and videos; it cannot take audio"):
        answer(model, audio=[tmp_path / "talk.wav"])


@pytest.fixture(scope="module")
def address(model: LanguageModel) -> Iterator[str]:
    local = LocalEngine(ServeSettings())
    local.open(model)
    service = ModelService("tiny", local, loaded=loaded_model(model, ServeSettings()))
    with live(create_app(service, ServeSettings())) as address:
        yield address
        until(lambda: local.state().running == 0)
        assert local.state().cache_usage == 0, "every page is back"
    asyncio.run(local.close())


def test_the_server(address: str, model: LanguageModel) -> None:
    """From here on the engine belongs to the server."""
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)

    def ask(data: bytes, **fields: Any) -> Any:
        url = "data:image/png;base64," + base64.b64encode(data).decode()
        parts: Any = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": ASKED}]
        given = {"model": "tiny", "max_tokens": 12, "temperature": 0, **fields}
        return client.chat.completions.create(messages=[{"role": "user", "content": parts}], **given)

    cat = ask(CAT, extra_body={"speculative": "off"})
    text = cat.choices[0].message.content
    assert ask(DOG).choices[0].message.content != text
    assert ask(CAT, extra_body={"speculative": "lookup"}).choices[0].message.content == text
    chunks = ask(CAT, stream=True)
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == text
    assert cat.usage.prompt_tokens > 20
    with pytest.raises(openai.BadRequestError, match=r"image_url\.url is not a picture"):
        ask(b"nothing")
    assert call(address, "/props", method="GET").json["modalities"] == {"vision": True, "video": True, "audio": True}
    for prompt in ("a <|image|> that nobody sent", [1, 290, 40, 291]):  # all the client's own, but nothing to see there
        reply = call(address, "/v1/completions", {"prompt": prompt, "max_tokens": 2})
        assert reply.status == 400 and "no files came with it" in reply.json["error"]["message"]


def test_the_server_encodes_each_picture_once(address: str, model: LanguageModel) -> None:
    """And it goes on where there was no memory for one."""
    family: Any = model.media._family  # type: ignore[union-attr]
    encode, ran, full = family.encode, [], [False]

    def counted(prepared: Any) -> Any:
        ran.append(prepared.kind)
        if full[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return encode(prepared)

    def block(seed: int) -> dict[str, Any]:
        data = base64.b64encode(encoded(picture(seed=seed))).decode()
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    def send(path: str, *turns: Any, **more: Any) -> Any:
        messages = [{"role": "assistant" if n % 2 else "user", "content": turn} for n, turn in enumerate(turns)]
        return call(address, path, {"model": "tiny", "messages": messages, **more})

    def ask(*turns: Any) -> Any:
        return send("/v1/messages", *turns, max_tokens=4, temperature=0)

    family.encode = counted
    try:
        first = [block(11), block(12), {"type": "text", "text": ASKED}]
        count = send("/v1/messages/count_tokens", first).json["input_tokens"]
        assert ran == [], "nobody needs rows to count them"
        answered = ask(first)
        assert answered.json["usage"]["input_tokens"] == count and len(ran) == 2
        used = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": [block(13), block(11)]}
        assert ask(first, [used], [result]).status == 200
        assert len(ran) == 3, "one of four pictures is new"
        assert ask(first).json["content"] == answered.json["content"]
        full[0] = True
        assert ask([block(14)]).status == 503
        assert ask(first).json["content"] == answered.json["content"], "it is remembered"
        full[0] = False
        assert ask([block(14)]).status == 200 and len(ran) == 5
    finally:
        family.encode = encode
