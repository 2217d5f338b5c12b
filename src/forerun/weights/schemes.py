"""Ways to store quantised weights in safetensors, as config.json names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.errors import ForerunError

KEYS = ("quantization", "quantization_config", "compression_config")  # MLX writes the first two
INT8 = "forerun-int8"  # what `forerun convert --quantize int8` writes
BLOCKS = "forerun-blocks"  # with other formats
BLOCK_FORMATS = ("q8_0", "q4_0")
MLX, GPTQ, AWQ, COMPRESSED, FP8 = "mlx", "gptq", "awq", "compressed-tensors", "fp8"
METHOD_NAMES = {
    AWQ: "AWQ",
    "bitsandbytes": "bitsandbytes",
    COMPRESSED: "compressed-tensors",
    FP8: "FP8",
    GPTQ: "GPTQ",
    "modelopt": "NVIDIA ModelOpt",
    "mxfp4": "MXFP4",
    "nvfp4": "NVFP4",
}
GPTQ_BITS = (2, 4, 8)
PACKED_BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the matrices of a model are stored."""

    method: str
    name: str  # for people
    settings: Mapping[str, Any] = field(default_factory=dict)  # what config.json says about it

    def whole(self, key: str, default: int = 0) -> int:
        """A whole number of the settings."""
        value = self.settings.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else default


def scheme_of(config: Mapping[str, Any], where: str) -> Scheme | None:
    """None: weights are plain floats. An error for what is not read; `where` names the model in it."""
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, dict) else {}):
        for key in KEYS:
            if settings := part.get(key):
                return _known(key, settings, where)
    return None


def _known(key: str, settings: object, where: str) -> Scheme:
    name = quantisation_name(key, settings)
    values = settings if isinstance(settings, dict) else {}
    method = values.get("quant_method")
    if method is None and all(type(values.get(key)) is int for key in ("bits", "group_size")):
        method = MLX if values.get("mode", "affine") == "affine" and "checkpoint_format" not in values else None
    scheme = Scheme(str(method).lower(), name, values)
    if method is None or not READABLE.get(scheme.method, _never)(scheme):
        raise ForerunError(
            f"{where}: the weights are quantised with {name}, which is not read; "
            "use the original float16/bfloat16 model or a GGUF file (--quantize int8 quantises it here)"
        )
    return scheme


def _never(scheme: Scheme) -> bool:  # noqa: ARG001
    return False


def _always(scheme: Scheme) -> bool:  # noqa: ARG001
    return True


def _packed(scheme: Scheme) -> bool:
    """compressed-tensors with one way for all matrices: packed whole numbers, 8 bits, or 8-bit floats."""
    groups = scheme.settings.get("config_groups")
    found = list(groups.values()) if isinstance(groups, dict) else []
    weights = [group.get("weights") for group in found if isinstance(group, dict)]
    if not weights or not all(isinstance(each, dict) for each in weights):
        return False
    bits = {each.get("num_bits") for each in weights if isinstance(each, dict)}
    form = scheme.settings.get("format")
    return (form == "pack-quantized" and bits <= set(PACKED_BITS)) or (
        form in ("int-quantized", "float-quantized") and bits == {8}
    )


READABLE = {
    INT8: _always,
    BLOCKS: lambda scheme: scheme.settings.get("format") in BLOCK_FORMATS,
    MLX: _always,
    GPTQ: lambda scheme: (
        scheme.whole("bits") in GPTQ_BITS and scheme.settings.get("checkpoint_format", "gptq") in ("gptq", "gptq_v2")
    ),
    AWQ: lambda scheme: scheme.whole("bits", 4) == 4 and str(scheme.settings.get("version", "gemm")).lower() == "gemm",
    COMPRESSED: _packed,
    FP8: _always,
}


def quantisation_name(key: str, value: object) -> str:
    """What people call the format: 'FP8', 'MLX (4 bit)', 'NVIDIA ModelOpt (NVFP4)'."""
    settings = value if isinstance(value, dict) else {}
    method = settings.get("quant_method")
    if isinstance(method, str) and method:
        method = method[:40]
        name = METHOD_NAMES.get(method.lower().removesuffix("_fp4"), method)
        detail = settings.get("quant_algo") or settings.get("format") or settings.get("fmt")
    elif key == "quantization":
        name, detail = "MLX", f"{settings['bits']} bit" if isinstance(settings.get("bits"), int) else None
        mode = settings.get("mode", "affine")
        detail = detail if mode == "affine" else mode
    else:
        name, detail = "an unnamed method", settings.get("quant_algo") or settings.get("format")
    if detail and str(detail).lower() != name.lower():
        return f"{name} ({str(detail)[:40]})"
    return name
