"""Makes a tiny Gemma 4 model and an assistant for it, both trained for some seconds on simple sentences.

The pair knows little, but the assistant knows the model: many of its drafts are accepted. Tests make one on the fly.

    python tools/make_gemma_pair.py FOLDER            # FOLDER/target and FOLDER/assistant
    python tools/make_gemma_pair.py FOLDER --kind 12B # shapes in the manner of 12B, a dense head; default: E4B
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

VOCAB, ROWS, CLUSTERS, TOP = 290, 320, 20, 8  # tokens of the tokenizer, rows of the matrices, clusters of the head
SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>"]
LENGTH, BATCH, WINDOW = 64, 8, 24
TARGET_STEPS, ASSISTANT_STEPS, UNROLLED = 110, 120, 3
WHO = ["The old sailor", "A young painter", "My neighbour", "The teacher", "Nobody", "Her little brother"]
DOES = ["looks at", "remembers", "draws", "talks about", "forgets", "wants to buy"]
WHAT = ["the blue boat", "a yellow house", "some strange music", "the last train", "a map of the island"]
WHERE = ["in the morning", "near the harbour", "without a word", "under the bridge", "every single day"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}model: "
SLIDING, FULL = "sliding_attention", "full_attention"
SIZES: dict[str, Any] = {
    "vocab_size": ROWS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL, SLIDING, FULL], "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "global_head_dim": 32, "sliding_window": WINDOW, "max_position_embeddings": 512,
    "final_logit_softcapping": 30.0, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "E4B": {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": ROWS},
    "12B": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
}


def sentences(count: int) -> str:
    """About a few people, what they do and where: easy to learn, and not to be known by heart."""
    dice = random.Random(0)
    return " ".join(
        f"{dice.choice(WHO)} {dice.choice(DOES)} {dice.choice(WHAT)} {dice.choice(WHERE)}." for _ in range(count)
    )


def make_tokenizer(text: str) -> Any:
    """Bytes and a few merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([text], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def batches(ids: Tensor, steps: int, generator: torch.Generator) -> Any:
    """Random stretches [BATCH, LENGTH]."""
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - LENGTH, (BATCH,), generator=generator)
        yield torch.stack([ids[start : start + LENGTH] for start in starts.tolist()])


def train(parameters: Any, steps: int, loss_of: Any, data: Any, rate: float) -> float:
    """Adam with a falling rate; the last loss."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    loss = torch.tensor(0.0)
    for batch in data:
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    return float(loss.detach())


def make_target(kind: str, ids: Tensor, generator: torch.Generator) -> tuple[Any, float]:
    """A model of the family, and how well it predicts."""
    import transformers

    name = "Gemma4Unified" if kind == "12B" else "Gemma4"
    config = getattr(transformers, name + "TextConfig")(**(SIZES | KINDS[kind]))
    model = getattr(transformers, name + "ForCausalLM")(config).float()

    def loss_of(batch: Tensor) -> Tensor:
        logits = model(batch, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    loss = train(list(model.parameters()), TARGET_STEPS, loss_of, batches(ids, TARGET_STEPS, generator), 4e-3)
    return model.eval(), loss


def masks() -> dict[str, Tensor]:
    """What a query that stands at a position sees, for all positions of a stretch at once."""
    row, key = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None, :]
    seen = {FULL: key <= row, SLIDING: (key <= row) & (key > row - WINDOW)}
    return {kind: torch.where(mask, 0.0, float("-inf"))[None, None] for kind, mask in seen.items()}


def make_assistant(kind: str, target: Any, ids: Tensor, generator: torch.Generator) -> tuple[Any, float]:
    """Trained to say what the target would, a few tokens ahead, from the target's keys and values."""
    import transformers

    unified = kind == "12B"
    name = "Gemma4Unified" if unified else "Gemma4"
    sizes = {name: SIZES[name] for name in SIZES if name != "final_logit_softcapping"} | {
        "hidden_size": 32, "intermediate_size": 96, "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        "num_kv_shared_layers": 4,
    }  # fmt: skip
    if unified:
        sizes |= KINDS[kind]
    else:
        sizes |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    text = getattr(transformers, name + "TextConfig")(**sizes)
    config = getattr(transformers, name + "AssistantConfig")(
        text_config=text, backbone_hidden_size=SIZES["hidden_size"], use_ordered_embeddings=not unified,
        num_centroids=CLUSTERS, centroid_intermediate_top_k=TOP,
    )  # fmt: skip
    model = getattr(transformers, name + "AssistantForCausalLM")(config).float()
    seen, place = masks(), torch.arange(LENGTH)[None]

    def loss_of(batch: Tensor) -> Tensor:
        with torch.no_grad():
            output = target.model(batch, use_cache=False, return_shared_kv_states=True)
            state, shared = output.last_hidden_state, dict(output.shared_kv_states)
            wanted = target.lm_head(state).argmax(-1)  # [batch, length]: after each token
            embedded = target.model.embed_tokens(batch)
        losses = []
        for step in range(UNROLLED):  # at position t: the token t + 1 + step, and the one after it
            ahead = 1 + step
            inputs = torch.cat([embedded.roll(-ahead, 1), state], dim=-1)
            found = model.model(
                inputs_embeds=model.pre_projection(inputs), attention_mask=seen, position_ids=place,
                shared_kv_states=shared, use_cache=False,
            ).last_hidden_state  # fmt: skip
            state, last = model.post_projection(found), LENGTH - ahead
            logits, labels = model.lm_head(found)[:, :last], wanted.roll(-ahead, 1)[:, :last]
            losses.append(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
            if model.masked_embedding is not None:
                clusters = model.masked_embedding.centroids(found)[:, :last].flatten(0, 1)
                losses.append(F.cross_entropy(clusters, cluster_of[labels.flatten()]))
        return torch.stack(losses).mean()

    ordering = torch.randperm(ROWS, generator=generator)
    cluster_of = torch.empty(ROWS, dtype=torch.long)
    cluster_of[ordering] = torch.arange(ROWS) // (ROWS // CLUSTERS)
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering.copy_(ordering)
    loss = train(list(model.parameters()), ASSISTANT_STEPS, loss_of, batches(ids, ASSISTANT_STEPS, generator), 4e-3)
    return model.eval(), loss


def save(folder: Path, model: Any, tokenizer: Any) -> None:
    """As the hub has them: tied weights once."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(model.config.to_json_string())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    tokenizer.save_pretrained(folder)


def make_pair(folder: Path, kind: str = "E4B", seed: int = 0) -> tuple[float, float]:
    """Write both folders; the losses of model and assistant. The same seed gives the same pair on one machine."""
    text = sentences(4000)
    tokenizer = make_tokenizer(text)
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        target, loss = make_target(kind, ids, generator)
        assistant, draft_loss = make_assistant(kind, target, ids, generator)
    save(folder / "target", target, tokenizer)
    save(folder / "assistant", assistant, tokenizer)
    return loss, draft_loss


def main() -> None:
    """Make a pair and say what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="E4B")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began = time.perf_counter()
    loss, draft_loss = make_pair(given.folder, given.kind, given.seed)
    print(f"{given.folder}: loss {loss:.2f}, assistant {draft_loss:.2f}, {time.perf_counter() - began:.0f} s")  # noqa: T201


if __name__ == "__main__":
    main()
