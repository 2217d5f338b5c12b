"""Text to tokens and back, and what a chat looks like to the model."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from forerun.serve.chat_service import ChatPipeline
from forerun.serve.dialects.fields import Id
from forerun.serve.errors import bad_request
from forerun.serve.generation import check_characters
from forerun.serve.model_service import LoadedModel, ModelService
from forerun.serve.off_loop import OffLoop
from forerun.serve.routes.chat_request import ChatRequest
from forerun.serve.routes.openai_fields import Name
from forerun.serve.routes.strict import Several, Strict
from forerun.text.guarded import check_unicode

MAX_IDS = 1_000_000


class TokenizeRequest(Strict):
    """A text, under the name that llama.cpp or vLLM gives it."""

    model: Name | None = None
    content: str | None = None
    prompt: str | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(Strict):
    """Token ids."""

    model: Name | None = None
    tokens: Annotated[Several[Id], Field(max_length=MAX_IDS)]


def router(chats: ChatPipeline, models: ModelService, off_loop: OffLoop) -> APIRouter:
    """For whoever counts tokens or looks at prompts."""
    routes = APIRouter(tags=["tokens"])

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """The ids of a text; llama.cpp's `content` without the first token (BOS), vLLM's `prompt` with it."""
        models.check_name(body.model)
        model = models.loaded()
        text = body.prompt if body.content is None else body.content
        if text is None or (body.content is not None and body.prompt is not None):
            raise bad_request("Give the text as 'content' or as 'prompt'.", "content")
        special = body.add_special if body.add_special_tokens is None else body.add_special_tokens
        if special is None:
            special = body.content is None
        check_characters(model, len(text), "content")
        ids = await off_loop.run(lambda: _ids(model, text, special), "content")
        tokens = [_piece(model, token) for token in ids] if body.with_pieces else ids
        return {"tokens": tokens, "count": len(ids), "max_model_len": model.context}

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        """The text of ids, under both names."""
        models.check_name(body.model)
        model = models.loaded()
        check_ids(body.tokens, model.tokenizer)
        text = await off_loop.run(lambda: str(model.tokenizer.decode(body.tokens)), "tokens")
        return {"content": text, "prompt": text}

    @routes.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """Special tokens and the chat template, under vLLM's address."""
        tokenizer = models.loaded().tokenizer
        return {
            **tokenizer.special_tokens_map,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": tokenizer.chat_template,
        }

    @routes.post("/apply-template")
    async def apply_template(body: ChatRequest) -> dict[str, str]:
        """The prompt that the model would see, as text."""
        models.check_name(body.model)
        return {"prompt": (await chats.prompt(body.job())).text}

    return routes


def check_ids(ids: list[int], tokenizer: Any) -> None:
    """All at once: a tokenizer takes long to say how many tokens it has."""
    last = len(tokenizer) - 1
    if max(ids, default=0) > last:
        raise bad_request(f"Token ids end at {last}.", "tokens")


def _ids(model: LoadedModel, text: str, special: bool) -> list[int]:
    check_unicode([text])
    ids: list[int] = model.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids


def _piece(model: LoadedModel, token: int) -> dict[str, Any]:
    text, data = model.token_bytes.of(token)
    return {"id": token, "piece": text if text.encode() == data else list(data)}
