"""Text at the edges: prompts into tokens, tokens into text, and stop strings in between."""
