"""Tiny random models for tests: a small Hugging Face folder, tokenizer and chat template included."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.weights.checkpoint import open_checkpoint
from forerun.weights.find import find
from forerun.weights.tokenizer import load_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
MERGES = """
    h e;i n;e r;a n;Ġ t;Ġ a;o n;r e;a t;e n;o r;Ġt he;e s;an d;i s;i t;Ġ s;o u;Ġ w;in g;
    Ġ o;a r;a l;s t;Ġ and;l l;e d;o m;u s;t h
"""

CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with 290 ids: 4 specials, 256 bytes, 30 merges. Any text goes in and comes back."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = SPECIALS + sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left, right in (merge.split() for merge in MERGES.split(";"))]
    pieces += [left + right for left, right in merges]
    model = models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(special, special=True, normalized=False) for special in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    """A tiny model's config; vocab_size is larger than the tokenizer's 290 ids, as in many real models."""
    values: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        # Large enough that a random model prefers some tokens clearly, so that wrong arithmetic changes its text.
        "initializer_range": 0.15,
    }
    if family == "qwen3":
        values["head_dim"] = 16
    if family == "mistral":
        values["sliding_window"] = None
    return values | overrides


def tiny_model(folder: Path, family: str, *, seed: int = 0, **config_overrides: Any) -> Path:
    """Writes a random model of `family` (llama, mistral, qwen2, qwen3) into `folder` and returns the folder.

    Any config value can be overridden, dimensions that are not multiples of 16 included:
    `tiny_model(path, "llama", hidden_size=72, intermediate_size=88, head_dim=12, num_hidden_layers=3)`.
    """
    import torch
    import transformers

    name = CLASSES[family]
    config = getattr(transformers, f"{name}Config")(**tiny_config(family, **config_overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{name}ForCausalLM")(config).float()
        _randomise_vectors(model)
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config.eos_token_id = [2, 0]
    model.save_pretrained(folder, safe_serialization=True)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def _randomise_vectors(model: Any) -> None:
    """Norm weights start as ones and biases as zeros: give both values, so that forgetting one is noticed."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            elif "norm" in name:
                parameter.normal_(1.0, 0.1)


def tiny_gguf(file: Path, folder: Path, *, kind: str = "F32", **metadata: Any) -> Path:
    """Writes the model of `folder` (from `tiny_model`) as a GGUF file the way llama.cpp does, and returns the file.

    Matrices whose rows fit the blocks of `kind` (F32, F16, BF16, Q8_0, Q4_0, ...) are stored in it, the rest as F32.
    Extra metadata goes in by keyword, dots written as two underscores: `llama__rope__freq_base=5000.0`.
    """
    import json

    import gguf
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    architecture = "llama" if config["model_type"] == "mistral" else config["model_type"]
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(file, architecture)
    _add_metadata(writer, config)
    for key, value in metadata.items():
        _add_value(writer, key.replace("__", "."), value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    wanted = gguf.GGMLQuantizationType[kind]
    for name, array in load_file(folder / "model.safetensors").items():
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            array = interleave_halves(array, config["head_dim"])
        fits = array.ndim == 2 and array.shape[1] % gguf.GGML_QUANT_SIZES[wanted][0] == 0
        stored = wanted if fits else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(array, stored)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def gguf_values(file: Path) -> dict[str, torch.Tensor]:
    """What a GGUF file says, under Hugging Face's names: floats as they are stored, blocks as a conversion has them."""
    checkpoint = open_checkpoint(file)
    return {name: checkpoint.raw(name) for name in checkpoint.names()}


def opened(file: Path) -> None:
    """Everything of a GGUF file that is looked at before its weights are."""
    open_checkpoint(find(str(file)))
    load_tokenizer(file)


def interleave_halves(array: Any, head_dim: int) -> Any:
    """llama.cpp's order of q and k rows: of each head, row 0 of the first half, row 0 of the second, row 1, ..."""
    rows = [
        start + pair + half * head_dim // 2
        for start in range(0, len(array), head_dim)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    return array[rows]


def _add_metadata(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    tokenizer = tiny_tokenizer()
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIALS else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge.split()) for merge in MERGES.split(";")])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_value(writer: Any, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add[list] = writer.add_array
    # The last one wins, so that a test can replace what the model says; None takes it away.
    writer.kv_data[0].pop(key, None)
    if value is not None:
        add[type(value)](key, value)
