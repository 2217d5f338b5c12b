"""The server: OpenAI, Responses and Anthropic dialects over one chat pipeline, and the web page."""
