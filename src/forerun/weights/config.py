"""config.json: read as plain data, and refused by name where it asks for code or for number formats not read here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.errors import ForerunError
from forerun.weights.described import described

CODE_KEYS = ("auto_map", "model_file")
QUANTISED_KEYS = ("quantization_config", "compression_config", "quantization")
OWN_METHOD = "forerun-int8"  # what `forerun convert --quantize int8` writes
METHOD_NAMES = {
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "fp8": "FP8",
    "gptq": "GPTQ",
    "modelopt": "NVIDIA ModelOpt",
    "mxfp4": "MXFP4",
    "nvfp4": "NVFP4",
}


def read_config(model: Path) -> dict[str, Any]:
    """The config.json of a model folder, or what the header of a GGUF file says in its place, checked."""
    if not model.is_dir() and not model.is_file():
        raise ForerunError(f"{model} is not a folder")
    config = described(model, "config.json")
    if config is None:
        raise ForerunError(f"{model} has no config.json: not a model folder (Hugging Face layout expected)")
    check_config(config, str(model))
    return config


def check_config(config: dict[str, Any], where: str) -> None:
    """Refuses what is not read here; `where` names the model in the message."""
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, dict) else {}):
        _refuse_code(part, where)
        _refuse_quantised(part, where)
    if not isinstance(config.get("model_type"), str):
        raise ForerunError(f"{where}: config.json has no 'model_type'")


def _refuse_code(config: dict[str, Any], where: str) -> None:
    for key in CODE_KEYS:
        if config.get(key):
            raise ForerunError(
                f"{where}: config.json asks for code from the model folder ({key!r}), which is never run; "
                "use a version of the model without it"
            )


def _refuse_quantised(config: dict[str, Any], where: str) -> None:
    for key in QUANTISED_KEYS:
        settings = config.get(key)
        if isinstance(settings, dict) and settings.get("quant_method") == OWN_METHOD:
            continue
        if settings:
            raise ForerunError(
                f"{where}: the weights are quantised with {quantisation_name(key, config[key])}, which is not read; "
                "use the original float16/bfloat16 model or a GGUF file (--quantize int8 quantises it here)"
            )


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
    else:
        name, detail = "an unnamed method", settings.get("quant_algo") or settings.get("format")
    if detail and str(detail).lower() != name.lower():
        return f"{name} ({str(detail)[:40]})"
    return name
