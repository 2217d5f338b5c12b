"""The tools of a request to /v1/messages: those it declares, with what the conversation added and took away."""

from __future__ import annotations

from collections.abc import Iterable

from forerun.serve.chat_job import Tool
from forerun.serve.dialects import messages_blocks as blocks
from forerun.serve.dialects.notes import Notes
from forerun.serve.errors import bad_request


class ToolBox:
    """A prompt has one list of tools, at its beginning: the one that holds at the end of the conversation."""

    def __init__(self, declared: Iterable[blocks.AnyTool], notes: Notes) -> None:
        self._notes = notes
        self._known: dict[str, Tool] = {}
        self._gone: set[str] = set()
        for tool in declared:
            if isinstance(tool, blocks.CustomTool) and tool.name in self._known:
                raise bad_request(f"Two tools are called '{tool.name}'.", "tools")
            self._define(tool)

    @property
    def tools(self) -> list[Tool]:
        """In the order they were declared."""
        return [tool for tool in self._known.values() if tool.name not in self._gone]

    def change(self, block: blocks.ToolChangeBlock, param: str) -> None:
        """In the middle of the conversation."""
        tool = block.tool
        self._notes.fields(block, "cache_control")
        if isinstance(tool, blocks.InlineTool):
            self._define(tool.definition)
            name = tool.definition.name
        elif isinstance(tool, blocks.ToolName):
            name = tool.name
            if name not in self._known:
                raise bad_request(f"There is no tool '{name}' to add or remove.", param)
        else:
            self._notes.unused(f"{block.type} {tool.type}")
            return
        if block.type == "tool_removal":
            self._gone.add(name or "")
        else:
            self._gone.discard(name or "")

    def _define(self, tool: blocks.AnyTool) -> None:
        if not isinstance(tool, blocks.CustomTool):
            self._notes.unused(f"tool {tool.type}")
            return
        self._notes.fields(tool, "cache_control")
        unused = ("input_examples", "allowed_callers", "defer_loading", "eager_input_streaming")
        self._notes.fields(tool, *unused, under="tools.")
        self._known[tool.name] = Tool(tool.name, tool.description or "", tool.input_schema, bool(tool.strict))
