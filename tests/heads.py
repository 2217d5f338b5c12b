"""Tiny MTP heads for tests: random or briefly trained ones, their folder, and the head's maths in plain torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from engines import CHUNK, CONTEXT, CPU, PAGE, VOCAB, engine, pool_for
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from forerun.cache.pages import PagePool, SequenceCache
from forerun.draft.head import build_head
from forerun.draft.mtp import MtpDrafter
from forerun.engine.engine import Engine
from forerun.engine.plan import Plan, Ticket
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.rows import make_pass
from forerun.sample.choose import probabilities
from forerun.sample.history import TokenHistory
from forerun.sample.parameters import SamplingParams
from forerun.sample.row import Row
from forerun.weights.checkpoint import open_checkpoint
from forerun.weights.fingerprint import fingerprint
from forerun.weights.heads import read_head

Weights = dict[str, Tensor]
BLOCK = "mtp.layers.0."


@dataclass(frozen=True)
class HeadShape:
    """The shape of a head's block; it need not be the target's."""

    hidden: int
    heads: int = 4
    kv_heads: int = 2
    size: int = 20
    inner: int = 88
    eps: float = 1e-5
    theta: float = 10000.0
    taps: tuple[int, ...] = ()
    bias: bool = False  # on queries, keys and values
    head_norms: bool = False

    def layer(self) -> dict[str, Any]:
        return {
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.size,
            "intermediate_size": self.inner, "rms_norm_eps": self.eps, "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.theta},
        }  # fmt: skip


def random_head(shape: HeadShape, seed: int = 0) -> Weights:
    """Every tensor random, norms around one, so that a forgotten one is noticed."""
    generator = torch.Generator().manual_seed(seed)
    h, q, kv, inner = shape.hidden, shape.heads * shape.size, shape.kv_heads * shape.size, shape.inner
    attention, mlp = BLOCK + "self_attn.", BLOCK + "mlp."
    matrices = {
        "mtp.fc": (h, 2 * h), attention + "q_proj": (q, h), attention + "k_proj": (kv, h),
        attention + "v_proj": (kv, h),
        attention + "o_proj": (h, q), mlp + "gate_proj": (inner, h), mlp + "up_proj": (inner, h),
        mlp + "down_proj": (h, inner),
    }  # fmt: skip
    norms = [
        "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", BLOCK + "input_layernorm",
        BLOCK + "post_attention_layernorm",
    ]  # fmt: skip
    if shape.taps:
        matrices["mtp.fuse"] = (h, (len(shape.taps) + 1) * h)
        norms += [f"mtp.tap_norms.{n}" for n in range(len(shape.taps) + 1)]
    sizes = dict.fromkeys(norms, h)
    if shape.head_norms:
        sizes |= {attention + "q_norm": shape.size, attention + "k_norm": shape.size}
    weights = {f"{name}.weight": torch.randn(size, generator=generator) * 0.15 for name, size in matrices.items()}
    weights |= {f"{name}.weight": 1 + torch.randn(size, generator=generator) * 0.1 for name, size in sizes.items()}
    if shape.bias:
        for name, size in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            weights[f"{attention}{name}.bias"] = torch.randn(size, generator=generator) * 0.2
    return weights


def write_head(
    folder: Path, target: Path, shape: HeadShape, weights: Weights, vocabulary: list[int] | None = None, **changes: Any
) -> Path:
    """A head's folder; `changes` replace entries of its config.json."""
    checkpoint = open_checkpoint(target)
    config = {
        "format": "forerun-mtp-head",
        "version": 1,
        "target": {name: checkpoint.config[name] for name in ("model_type", "hidden_size", "vocab_size")}
        | {"num_hidden_layers": checkpoint.config["num_hidden_layers"], "hash": fingerprint(checkpoint)},
        "taps": list(shape.taps),
        "layer": shape.layer(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    tensors = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
    if vocabulary is not None:
        tensors["mtp.draft_vocab"] = torch.tensor(vocabulary)
    save_file(tensors, folder / "head.safetensors")
    return folder


@dataclass
class TwinPass:
    """What the twin computed for slots 0 … n − 1."""

    outputs: Tensor  # [n, hidden], after the final norm of the head
    keys: Tensor  # [kv heads, n, size], rotated
    values: Tensor


def norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of x [heads, n, size], halves paired."""
    half = x.shape[-1] // 2
    angles = positions.float()[:, None] / theta ** (torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def fuse(weights: Weights, shape: HeadShape, features: Tensor) -> Tensor:
    """The target's features [n, (taps + 1) · hidden] as the head's input [n, hidden]."""
    if not shape.taps:
        return features
    parts = features.split(shape.hidden, dim=1)
    normed = [norm(part, weights[f"mtp.tap_norms.{n}.weight"], shape.eps) for n, part in enumerate(parts)]
    return torch.cat(normed, dim=1) @ weights["mtp.fuse.weight"].T


def twin(
    weights: Weights,
    shape: HeadShape,
    embedding: Tensor,
    hidden: Tensor,
    tokens: Tensor,
    before: TwinPass | None = None,
    positions: Tensor | None = None,
    begin: int = 1,
) -> TwinPass:
    """The head in plain torch. Slot s: `hidden[s]` (fused features, or an output of the head) and the token at s + 1.

    Alone: all slots of a text at once. With `before`, rows are first guesses after it: row r sits at slot
    `positions[r]` and sees the slots of `before` under it, and itself. `begin`: where the token of slot 0 stands in the
    text, whose position turns its keys.
    """

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def heads(x: Tensor, name: str, count: int) -> Tensor:
        split = linear(x, f"{BLOCK}self_attn.{name}_proj").unflatten(1, (count, shape.size)).transpose(0, 1)
        gain = weights.get(f"{BLOCK}self_attn.{name}_norm.weight")
        return split if gain is None else norm(split, gain, shape.eps)

    count = len(tokens)
    slots = torch.arange(count) if positions is None else positions
    pair = [
        norm(embedding[tokens], weights["mtp.pre_fc_norm_embedding.weight"], shape.eps),
        norm(hidden, weights["mtp.pre_fc_norm_hidden.weight"], shape.eps),
    ]
    x = linear(torch.cat(pair, dim=1), "mtp.fc")
    normed = norm(x, weights[BLOCK + "input_layernorm.weight"], shape.eps)
    queries = rotate(heads(normed, "q", shape.heads), slots + begin, shape.theta)
    keys = rotate(heads(normed, "k", shape.kv_heads), slots + begin, shape.theta)
    values = heads(normed, "v", shape.kv_heads)
    seen_keys, seen_values, visible = keys, values, torch.ones(count, count).tril().bool()
    if before is not None:
        past = torch.arange(before.keys.shape[1])[None] < slots[:, None]
        seen_keys = torch.cat([before.keys, keys], dim=1)
        seen_values = torch.cat([before.values, values], dim=1)
        visible = torch.cat([past, torch.eye(count).bool()], dim=1)
    groups = shape.heads // shape.kv_heads
    scores = queries @ seen_keys.repeat_interleave(groups, dim=0).transpose(1, 2) / shape.size**0.5
    mixed = scores.masked_fill(~visible, float("-inf")).softmax(-1) @ seen_values.repeat_interleave(groups, dim=0)
    x = x + linear(mixed.transpose(0, 1).flatten(1), BLOCK + "self_attn.o_proj")
    normed = norm(x, weights[BLOCK + "post_attention_layernorm.weight"], shape.eps)
    inner = F.silu(linear(normed, BLOCK + "mlp.gate_proj")) * linear(normed, BLOCK + "mlp.up_proj")
    x = x + linear(inner, BLOCK + "mlp.down_proj")
    return TwinPass(norm(x, weights["mtp.norm.weight"], shape.eps), keys, values)


@torch.inference_mode()
def observe(model: Decoder, tokens: list[int], taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The target's features and logits at every position of a text."""
    pool = PagePool(model.config.attention, CONTEXT // PAGE, PAGE, torch.float32, CPU)
    cache = SequenceCache(pool)
    cache.grow(len(tokens))
    kept, model.taps = model.taps, taps
    try:
        output = model.forward(make_pass([(cache, tokens)], last_only=False, features=True))
    finally:
        model.taps = kept
    assert output.features is not None
    return output.features.clone(), output.logits.clone()


def train_head(model: Decoder, texts: list[list[int]], shape: HeadShape, steps: int = 60) -> Weights:
    """A head that agrees with the target on `texts` often, trained over two unrolled steps."""
    embedding = model.embedding.float().clone()
    output = model.output_rows(torch.arange(model.config.vocab)).float().clone()
    seen = [(torch.tensor(text), *observe(model, text, shape.taps)) for text in texts]
    seen = [(tokens, features.clone(), logits.softmax(-1).clone()) for tokens, features, logits in seen]
    weights = {name: tensor.requires_grad_() for name, tensor in random_head(shape, seed=3).items()}
    optimiser = torch.optim.Adam(weights.values(), lr=0.01)
    for _ in range(steps):
        loss = torch.zeros(())
        for tokens, features, wanted in seen:
            first = twin(weights, shape, embedding, fuse(weights, shape, features[:-2]), tokens[1:-1])
            loss = loss - (wanted[1:-1] * (first.outputs @ output.T).log_softmax(-1)).sum(-1).mean()
            slots = torch.arange(1, len(tokens) - 2)
            second = twin(weights, shape, embedding, first.outputs[:-1], tokens[2:-1], first, slots)
            loss = loss - (wanted[2:-1] * (second.outputs @ output.T).log_softmax(-1)).sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {name: tensor.detach() for name, tensor in weights.items()}


def mtp_engine(model: Decoder, folder: Path, **options: Any) -> Engine:
    """An engine whose target has a head."""
    head = build_head(read_head(folder), model, VOCAB)
    model.taps = head.taps
    return engine(model, beside=[MtpDrafter(head, VOCAB)], **options)


@torch.inference_mode()
def say_logits(model: Decoder, tokens: list[int]) -> Tensor:
    """Logits after every token, of a model of any family."""
    cache = SequenceCache(pool_for(model, CONTEXT // PAGE))
    cache.grow(len(tokens))
    return model.forward(make_pass([(cache, tokens)], last_only=False)).logits


def joint(model: Decoder, prompt: list[int], length: int, settings: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """The exact probability of every possible answer of `length` tokens."""
    params = SamplingParams(**{name: value for name, value in settings.items() if name != "accept"})
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for answer, p in found.items():
            logits = say_logits(model, [*prompt, *answer])
            row = Row(params, TokenHistory(prompt), answer, len(prompt) + len(answer))
            q = probabilities(logits[-1:], [row], VOCAB)[0]
            longer.update({(*answer, token): p * float(q[token]) for token in q.nonzero()[:, 0].tolist()})
        found = longer
    return found


ODD = {"hidden_size": 72, "intermediate_size": 88, "head_dim": 20, "num_hidden_layers": 3}
SHAPE = HeadShape(72, taps=(1, 2))


def prompts(count: int) -> list[list[int]]:
    """Shorter than a chunk, a chunk, and several chunks long."""
    generator = torch.Generator().manual_seed(5)
    lengths = [3, CHUNK, 2 * CHUNK + 5, CHUNK + 1, 1, 3 * CHUNK, 7, 2 * CHUNK - 1][:count]
    return [torch.randint(4, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def drafts_of(machine: Engine) -> list[tuple[list[int], list[int]]]:
    """Grows by the text so far and the drafts after it, with every draft that is made."""
    made: list[tuple[list[int], list[int]]] = []
    usual = machine.runner.start

    def start(plan: Plan) -> Ticket:
        ticket = usual(plan)
        made.extend((turn.sequence.tokens[:], turn.draft.tokens) for turn in plan.generating if turn.draft.tokens)
        return ticket

    machine.runner.start = start  # type: ignore[method-assign]
    return made


def drafter_of(machine: Engine) -> MtpDrafter:
    drafter = machine.drafters.by_name["mtp"]
    assert isinstance(drafter, MtpDrafter)
    return drafter
