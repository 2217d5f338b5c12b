"""Text at the edges: prompts into tokens, tokens into text, and stop strings in between."""

from forerun.text.chat import encode_prompt
from forerun.text.detokenizer import Detokenizer
from forerun.text.stops import StopStrings

__all__ = ["Detokenizer", "StopStrings", "encode_prompt"]
