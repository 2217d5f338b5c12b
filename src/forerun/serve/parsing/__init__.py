"""A model's raw text into reasoning, content and tool calls, however it is cut into pieces."""
