"""What the header of a GGUF file says about its model: typed access to metadata, and the shapes of its tensors."""

from __future__ import annotations

from typing import Any

from forerun.errors import ForerunError
from forerun.weights.config_reader import ConfigReader
from forerun.weights.gguf_header import GgufHeader


class Metadata(ConfigReader):
    """The keys that begin with the name of the file's architecture and a dot, called by what follows."""

    def __init__(self, header: GgufHeader, where: str) -> None:
        """`where` names the file in messages."""
        self.everything = header.metadata
        self.shapes = {tensor.name: tensor.shape for tensor in header.tensors}
        self.architecture = str(self.everything.get("general.architecture", ""))
        own = f"{self.architecture}."
        values = {key.removeprefix(own): value for key, value in self.everything.items() if key.startswith(own)}
        super().__init__(values, where, f"metadata {own}")

    def decimal(self, key: str, default: float | None = None) -> float:
        """As `number`, as it was before it was rounded to 32 bits."""
        return decimal(self.number(key, default))

    def counts(self, key: str, layers: int) -> list[int]:
        """Of every layer: one number for all, or a list."""
        value = self.values.get(key)
        if not isinstance(value, tuple):
            return [self.integer(key)] * layers
        if len(value) != layers or not all(isinstance(one, int) and 0 < one < 2**31 for one in value):
            raise ForerunError(f"{self.name(key)} must have {layers} counts")
        return [int(one) for one in value]

    def linear_scaling(self) -> dict[str, Any]:
        """A rotation that is stretched evenly, in the words of `rope_parameters`; nothing where it is not.

        llama.cpp takes a factor for that where no type is named.
        """
        kind, key = self.values.get("rope.scaling.type"), "rope.scaling.factor"
        if kind not in (None, "none", "linear"):
            raise ForerunError(f"{self.where}: rope scaling {str(kind)[:40]!r} is not read")
        if kind == "none" or (kind is None and key not in self):
            return {}
        return {"rope_type": "linear", "factor": self.decimal(key)}

    def common_config(self) -> dict[str, Any]:
        """What config.json says in the same words in every family."""
        embedding = self.shapes.get("token_embd.weight", ())
        if len(embedding) != 2:
            raise ForerunError(f"{self.where}: tensor token_embd.weight is missing or has the shape {embedding}")
        return {
            "vocab_size": embedding[0],
            "hidden_size": self.integer("embedding_length"),
            "num_hidden_layers": self.integer("block_count"),
            "num_attention_heads": self.integer("attention.head_count"),
            "max_position_embeddings": self.integer("context_length"),
            "rms_norm_eps": self.decimal("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "output.weight" not in self.shapes,
            "bos_token_id": self.token("bos"),
            "eos_token_id": self.token("eos"),
            "pad_token_id": self.token("padding"),
        }

    def token(self, name: str) -> int | None:
        """The id of a token with a meaning: "bos", "eos", ..."""
        value = self.everything.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def decimal(value: float) -> float:
    """The shortest decimal of a 32-bit float: 9.999999747378752e-06 was written as 1e-05."""
    import numpy as np

    return float(str(np.float32(value)))
