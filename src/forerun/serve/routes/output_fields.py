"""What an answer must look like: OpenAI's response_format, vLLM's structured_outputs and guided fields, sglang's."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from forerun.serve.chat_job import OutputFormat, OutputKind
from forerun.serve.errors import bad_request
from forerun.serve.routes.strict import Json, Several, Strict

Choices = Annotated[Several[str], Field(min_length=1, max_length=10_000)]


class JsonSchema(Strict):
    """Under `json_schema` of a response format."""

    name: Annotated[str, StringConstraints(max_length=200)] | None = None
    description: Annotated[str, StringConstraints(max_length=10_000)] | None = None
    schema_: Annotated[dict[str, Json], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Strict):
    """Text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Json] | None, Field(alias="schema")] = None  # llama.cpp's, with json_object

    def output(self) -> OutputFormat | None:
        """None: any text."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise bad_request("'json_schema' belongs to the type of the same name.", "response_format.json_schema")
        if self.schema_ is not None and self.type != "json_object":
            raise bad_request("'schema' belongs to the type 'json_object'.", "response_format.schema")
        schema = self.schema_ if self.json_schema is None else self.json_schema.schema_
        if schema is not None:
            return OutputFormat("json_schema", schema)
        return OutputFormat("json_object") if self.type == "json_object" else None


class StructuredOutputs(Strict):
    """vLLM's: exactly one of them."""

    json_: Annotated[dict[str, Json] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class OutputFields(Strict):
    """All ways to say it; at most one may be used."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: dict[str, Json] | str | None = None
    regex: str | None = None
    guided_json: dict[str, Json] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    def output(self) -> OutputFormat | None:
        """None: any text."""
        structured = self.structured_outputs
        if structured is not None and structured.model_dump(exclude_none=True) == {}:
            raise bad_request("'structured_outputs' is empty.", "structured_outputs")
        found = [self.response_format.output()] if self.response_format else []
        for name, kind, value in self._named():
            if value is not None and value is not False:
                found.append(OutputFormat(kind, _schema(value, name) if kind == "json_schema" else value, name))
        if len(found) > 1:
            raise bad_request("The form of the answer is given more than once.", "response_format")
        return found[0] if found else None

    def _named(self) -> list[tuple[str, OutputKind, Any]]:
        """(field, kind, value or None)."""
        inner = self.structured_outputs or StructuredOutputs()
        return [
            ("json_schema", "json_schema", self.json_schema),
            ("regex", "regex", self.regex),
            ("guided_json", "json_schema", self.guided_json),
            ("guided_regex", "regex", self.guided_regex),
            ("guided_choice", "choice", self.guided_choice),
            ("guided_grammar", "grammar", self.guided_grammar),
            ("structured_outputs.json", "json_schema", inner.json_),
            ("structured_outputs.regex", "regex", inner.regex),
            ("structured_outputs.choice", "choice", inner.choice),
            ("structured_outputs.grammar", "grammar", inner.grammar),
            ("structured_outputs.json_object", "json_object", inner.json_object or None),
        ]


def _schema(value: dict[str, Any] | str, param: str) -> dict[str, Any]:
    """A schema may come as text."""
    if isinstance(value, dict):
        return value
    try:
        schema = json.loads(value)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise bad_request("The schema must be a JSON object.", param)
    return schema
