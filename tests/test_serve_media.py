"""Images, video and audio through the server on a real engine; the reader makes rows of whatever the bytes are."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest
from engines import decoder
from fake_media import FakeReader, seeing_tokenizer
from local_engines import language_model
from serve_fakes import call, live, until
from stream_rules import check_chat_stream, text_of
from tiny import tiny_model

from forerun.media.parts import PromptTooLong
from forerun.serve import media_reading
from forerun.serve.app import create_app
from forerun.serve.dialects.notes import Notes
from forerun.serve.local_engine import LocalEngine
from forerun.serve.model_service import ModelService, loaded_model
from forerun.serve.routes.chat_request import ChatRequest
from forerun.serve.settings import ServeSettings


class SlowReader(FakeReader):
    """Reads nothing while a test holds it up."""

    go_on = threading.Event()
    go_on.set()
    entered = 0

    def read(self, ids: Any, parts: Any) -> Any:
        self.entered += not self.go_on.is_set()
        assert self.go_on.wait(30)
        return super().read(ids, parts)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    target = decoder(tiny_model(tmp_path_factory.mktemp("m"), "llama", num_hidden_layers=1), quantize=False)
    model = language_model(target, context=900, pages=1500)
    model.tokenizer = seeing_tokenizer()
    model.media, model.stop_ids = SlowReader(model.tokenizer), frozenset({0, 2})
    local = LocalEngine(ServeSettings())
    local.open(model)
    yield local
    asyncio.run(local.close())


@pytest.fixture(scope="module")
def address(engine: LocalEngine) -> Iterator[str]:
    assert engine.model is not None
    settings = ServeSettings()
    service = ModelService("tiny", engine, loaded=loaded_model(engine.model, settings))
    with live(create_app(service, settings)) as address:
        yield address
        until(lambda: engine.state().running == 0)
        assert engine.state().cache_usage == 0, "every page is back"


@pytest.fixture
def reader(engine: LocalEngine) -> FakeReader:
    assert engine.model is not None and isinstance(engine.model.media, FakeReader)
    return engine.model.media


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def image(data: bytes = b"a cat", **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(data)}", **more}}


def sound(data: bytes = b"meow") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": encoded(data), "format": "wav"}}


def ask(*parts: dict[str, Any], text: str = "What is this?") -> Any:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def chat(address: str, messages: Any, **body: Any) -> dict[str, Any]:
    fields = {"messages": messages, "max_tokens": 16, "temperature": 0, "speculative": "off", **body}
    reply = call(address, "/v1/chat/completions", fields)
    assert reply.status == 200, reply.text
    answer: dict[str, Any] = reply.json
    return answer


def said(answer: dict[str, Any]) -> Any:
    """All that may not depend on what was asked before."""
    usage = {name: value for name, value in answer["usage"].items() if name != "prompt_tokens_details"}
    return [choice["message"]["content"] for choice in answer["choices"]], usage


def test_an_answer_about_a_picture_is_proved(address: str) -> None:
    proved = {"draft": "lookup", "depth": 4, "prove": True}
    answer = chat(address, ask(image(), sound()), speculative=proved, n=2, temperature=0.8, seed=3)
    assert answer["forerun"]["proof"] == {"identical": True, "tokens": answer["usage"]["completion_tokens"]}


def test_answers_depend_on_the_picture_alone(address: str) -> None:
    cat = chat(address, ask(image()))
    assert said(chat(address, ask(image()))) == said(cat)
    assert said(chat(address, ask(image(b"a dog"))))[0] != said(cat)[0]
    assert said(chat(address, ask()))[0] != said(cat)[0]
    for speculative in ("lookup", 3, "auto"):
        assert said(chat(address, ask(image()), speculative=speculative)) == said(cat)
    with ThreadPoolExecutor(6) as pool:
        pictures = [b"a cat", b"a dog", b"a cow"] * 2
        together = list(pool.map(lambda data: said(chat(address, ask(image(data)))), pictures))
    assert together[:3] == together[3:] and together[0] == said(cat)


@pytest.mark.parametrize("parts", [[image()], [sound()], [image(b"one"), sound(), image(b"two")]])
def test_the_official_client_gets_the_same_whole_and_streamed(address: str, parts: Any) -> None:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    fields: Any = {"model": "tiny", "messages": ask(*parts), "max_tokens": 12, "temperature": 0.7, "seed": 5}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    usages = [usage.to_dict() for usage in (chunks[-1].usage, whole.usage) if usage is not None]
    found, new = (usage.pop("prompt_tokens_details")["cached_tokens"] for usage in usages)  # type: ignore[index]
    assert usages[0] == usages[1] and found > new == 0
    reply = call(address, "/v1/chat/completions", {**fields, "stream": True})
    assert text_of(check_chat_stream(reply.text, broken=True)) == text


def test_one_reading_serves_all_choices_and_counts_every_row(address: str, reader: FakeReader) -> None:
    before = len(reader.read_parts)
    several = chat(address, ask(image()), n=3, temperature=0.9, seed=1)
    assert len(reader.read_parts) == before + 1
    assert len(set(said(several)[0])) > 1
    rows = len(reader.rows(reader.read_parts[-1][0]))
    bare = chat(address, ask(), n=1)["usage"]["prompt_tokens"]
    assert several["usage"]["prompt_tokens"] == bare + rows
    counted = call(address, "/v1/chat/completions/input_tokens", {"messages": ask(image())}).json["input_tokens"]
    assert counted == bare + rows and len(reader.read_parts) == before + 1, "to count is not to read"
    assert all(name.startswith("forerun prompts") for name in reader.threads), "never on the event loop"


def test_videos_and_the_forms_of_other_servers(address: str, reader: FakeReader) -> None:
    film = {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{encoded(b'a film')}"}}
    heard = {"type": "audio_url", "audio_url": {"url": f"data:audio/ogg;codecs=opus;base64,{encoded(b'meow')}"}}
    chat(address, ask(film, heard, image(detail="auto")))
    assert [(part.kind, part.data) for part in reader.read_parts[-1]] == [
        ("video", b"a film"),
        ("audio", b"meow"),
        ("image", b"a cat"),
    ]
    assert said(chat(address, ask(heard))) == said(chat(address, ask(sound())))


def test_texts_are_not_looked_through_for_pictures() -> None:
    """Letter by letter that would hold up everybody: eight megabytes take most of a second."""

    class Whole(str):
        def __iter__(self) -> Iterator[str]:
            raise AssertionError("letter by letter")

    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}]})
    request.messages[0].content = Whole("Hi")
    notes = Notes()
    request.note_unused(notes)
    assert not notes.headers()


def test_what_detail_asks_for_is_named_as_without_effect(address: str) -> None:
    body = {"messages": ask(image(detail="high")), "max_tokens": 2}
    assert call(address, "/v1/chat/completions", body).headers["x-forerun-warning"] == "not used: image_url.detail"
    answer = call(address, "/v1/chat/completions", {"messages": ask(image(detail="auto")), "max_tokens": 2})
    assert "x-forerun-warning" not in answer.headers


def test_anthropics_client_shows_pictures_and_so_do_its_tools(address: str, reader: FakeReader) -> None:
    client = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)
    picture: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(b"a cat")}}
    content: Any = [picture, {"type": "text", "text": "What is this?"}]
    fields: Any = {"model": "tiny", "max_tokens": 16, "messages": [{"role": "user", "content": content}]}
    body: Any = {"extra_body": {"speculative": "off", "temperature": 0}}
    whole = client.messages.create(**fields, **body)
    with client.messages.stream(**fields, **body) as stream:
        assert stream.get_final_text() == whole.content[0].text  # type: ignore[union-attr]
    wanted = chat(address, ask(image()))
    assert whole.content[0].text == said(wanted)[0][0]  # type: ignore[union-attr]
    read = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert read == wanted["usage"]["prompt_tokens"]
    assert client.messages.count_tokens(model="tiny", messages=fields["messages"]).input_tokens == read
    used: Any = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result: Any = {"type": "tool_result", "tool_use_id": "t1", "content": [picture, {"type": "text", "text": "done"}]}
    turns: Any = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    client.messages.create(model="tiny", max_tokens=2, messages=turns)
    assert [part.data for part in reader.read_parts[-1]] == [b"a cat"]
    shown = call(address, "/apply-template", {"messages": ask(image(), text="x <|image|>")}).json["prompt"]
    assert shown.count("<|image|>") == 2, "one of them is text"


def test_responses_shows_pictures_and_so_do_its_tools(address: str, reader: FakeReader) -> None:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    picture: Any = {"type": "input_image", "image_url": image()["image_url"]["url"], "detail": "high"}
    asked: Any = [{"role": "user", "content": [picture, {"type": "input_text", "text": "What is this?"}]}]
    body: Any = {"extra_body": {"speculative": "off"}, "temperature": 0, "max_output_tokens": 16, "model": "tiny"}
    raw = client.responses.with_raw_response.create(input=asked, **body)
    assert "input_image.detail" in raw.headers["x-forerun-warning"]
    whole = raw.parse()
    with client.responses.stream(input=asked, **body) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    wanted = chat(address, ask(image()))
    assert whole.output_text == said(wanted)[0][0]
    assert whole.usage is not None and whole.usage.input_tokens == wanted["usage"]["prompt_tokens"]
    call_item: Any = {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"}
    output: Any = {"type": "function_call_output", "call_id": "c", "output": [picture]}
    client.responses.create(input=[*asked, call_item, output], **body)
    assert [part.kind for part in reader.read_parts[-1]] == ["image", "image"]


URL = "messages[0].content[0].image_url.url"
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, URL, "fetches no URLs"),
    ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, URL, "fetches no URLs"),
    ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, URL, "fetches no URLs"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,A*=="}}, URL, "not valid base64"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, URL, "is empty"),
    ({"type": "image_url", "image_url": {"url": "data:image/png,plain"}}, URL, "begins with data:image/TYPE;base64"),
    ({"type": "image_url", "image_url": {"url": "data:text/html;base64,AAAA"}}, URL, "which is no image"),
    ({"type": "image_url", "image_url": {"url": "data:audio/wav;base64,AAAA"}}, URL, "which is no image"),
    (image(b"not a picture"), URL, "is not an image"),
    ({"type": "image_url", "image_url": {}}, URL, "required"),
    ({"type": "image_url", "image_url": {"url": 7}}, URL, "string"),
    ({"type": "image_url"}, "messages", "needs 'image_url'"),
    (image(detail="huge"), "messages[0].content[0].image_url.detail", "'auto'"),
    ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, "messages[0].content[0].input_audio.format", "required"),
    ({"type": "input_audio", "input_audio": {"data": "A", "format": "wav"}},
     "messages[0].content[0].input_audio.data", "not valid base64"),
    ({"type": "video_url", "video_url": {"url": "data:image/png;base64,AAAA"}},
     "messages[0].content[0].video_url.url", "which is no video"),
    ({"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA"}}, "messages", "not supported"),
    ({"type": "image", "image": "/etc/passwd"}, "messages", "send images as 'image_url'"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "param", "words"), BAD)
def test_what_is_wrong_with_a_part_is_a_400_that_names_it(
    address: str, part: dict[str, Any], param: str, words: str
) -> None:
    reply = call(address, "/v1/chat/completions", {"messages": ask(part)})
    assert reply.status == 400, reply.text
    error = reply.json["error"]
    assert error["param"] == param and words.lower() in error["message"].lower()
    assert "\n" not in error["message"]


def test_media_have_their_place_in_turns_of_the_user(address: str) -> None:
    for role in ("system", "assistant"):
        reply = call(address, "/v1/chat/completions", {"messages": [{"role": role, "content": [image()]}]})
        assert reply.status == 400 and reply.json["error"]["param"] == "messages[0].content"


def test_a_prompt_that_pictures_make_too_long_is_refused_with_its_length(address: str) -> None:
    reply = call(address, "/v1/chat/completions", {"messages": ask(*[image()] * 200)})
    error = reply.json["error"]
    assert reply.status == 400 and error["code"] == "context_length_exceeded"
    assert error["n_prompt_tokens"] > 800


def test_a_length_that_the_reader_finds_out_is_said_the_same_way(
    address: str, reader: FakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any) -> Any:
        raise PromptTooLong(1234, 900)

    monkeypatch.setattr(reader, "read", read)
    reply = call(address, "/v1/chat/completions", {"messages": ask(image())})
    error = reply.json["error"]
    assert reply.status == 400 and error["code"] == "context_length_exceeded" and error["param"] == "messages"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (1234, 900)


@pytest.mark.parametrize("prompt", ["a <|image|> b", [5, 290, 6], ["a", "<|audio|>"]])
def test_placeholders_that_nothing_came_for_are_refused(address: str, prompt: Any) -> None:
    reply = call(address, "/v1/completions", {"prompt": prompt, "max_tokens": 2})
    assert reply.status == 400 and reply.json["error"]["param"] == "prompt"
    assert "1 placeholder for media and no files came with it" in reply.json["error"]["message"]


def test_others_are_answered_while_pictures_are_read_and_too_many_wait_in_vain(
    address: str, reader: SlowReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = len(image(b"1")["image_url"]["url"])
    monkeypatch.setattr(media_reading, "MOST_CHARACTERS", 4 * one)
    reader.go_on.clear()
    try:
        with ThreadPoolExecutor(4) as pool:
            held = [pool.submit(chat, address, ask(image(bytes([n + 1])))) for n in range(4)]
            until(lambda: reader.entered == 2)  # as many as there are threads
            large = {"messages": ask(image(b"1234567890" * one))}
            full = call(address, "/v1/chat/completions", large)
            assert full.status == 429 and full.headers["retry-after"]
            assert said(chat(address, ask()))[0][0], "text alone waits for nobody"
            reader.go_on.set()
            assert all(one.result() for one in held)
    finally:
        reader.go_on.set()
    assert said(chat(address, ask(image())))[0][0]


def test_nothing_is_read_for_an_answer_that_has_no_place(
    address: str, engine: LocalEngine, reader: FakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = dataclasses.replace(engine.state(), waiting=ServeSettings().max_queue)
    monkeypatch.setattr(engine, "state", lambda: full)
    before = len(reader.read_parts)
    assert call(address, "/v1/chat/completions", {"messages": ask(image())}).status == 429
    assert len(reader.read_parts) == before


def test_nothing_is_read_for_an_answer_whose_form_cannot_be(address: str, reader: FakeReader) -> None:
    before = len(reader.read_parts)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    reply = call(address, "/v1/chat/completions", {"messages": ask(image()), "response_format": form})
    assert reply.status == 400 and "response_format" in reply.json["error"]["param"]
    assert len(reader.read_parts) == before


def test_what_the_model_reads_is_said(address: str) -> None:
    assert call(address, "/props", method="GET").json["modalities"] == {"vision": True, "video": True, "audio": True}
    listed = call(address, "/v1/models", method="GET").json
    assert listed["data"][0]["input_modalities"] == ["text", "image", "video", "audio"]
    assert listed["models"][0]["input_modalities"] == ["text", "image"]


def test_models_that_read_less_say_so(address: str, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.model is not None
    for kinds, words in ((None, "reads text only: images are"), (frozenset(("audio",)), "reads text and audio")):
        reader = None if kinds is None else FakeReader(engine.model.tokenizer, kinds=kinds)
        monkeypatch.setattr(engine.model, "media", reader)
        service = ModelService("tiny", engine, loaded=loaded_model(engine.model, ServeSettings()))
        with live(create_app(service, ServeSettings())) as other:
            for path in ("/v1/chat/completions", "/apply-template", "/v1/chat/completions/input_tokens"):
                reply = call(other, path, {"messages": ask(image())})
                assert reply.status == 400 and words in reply.json["error"]["message"]
            assert call(other, "/props", method="GET").json["modalities"]["vision"] is False


def test_who_leaves_while_a_picture_is_read_holds_nothing_up(
    address: str, engine: LocalEngine, reader: SlowReader
) -> None:
    reader.go_on.clear()
    before = reader.entered
    try:
        host, port = address.removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port))
        body = json.dumps({"messages": ask(image(b"left"))})
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        until(lambda: reader.entered > before)
        connection.close()
        assert said(chat(address, ask()))[0][0]
    finally:
        reader.go_on.set()
    assert said(chat(address, ask(image())))[0][0]
    until(lambda: engine.state().running == 0)


def test_a_picture_that_takes_too_long_is_given_up(engine: LocalEngine, reader: SlowReader) -> None:
    assert engine.model is not None
    settings = ServeSettings(queue_timeout=0.3)
    service = ModelService("tiny", engine, loaded=loaded_model(engine.model, settings))
    reader.go_on.clear()
    try:
        with live(create_app(service, settings)) as impatient, ThreadPoolExecutor(3) as pool:
            bodies = [{"messages": ask(image(bytes([n])))} for n in range(3)]
            replies = list(pool.map(lambda body: call(impatient, "/v1/chat/completions", body), bodies))
            assert sorted(reply.status for reply in replies) == [400, 400, 503], "the third never had its turn"
            reader.go_on.set()
            assert call(impatient, "/v1/chat/completions", {"messages": ask(image()), "max_tokens": 1}).status == 200
    finally:
        reader.go_on.set()
