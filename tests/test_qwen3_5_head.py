"""The native MTP head: against a twin made of transformers' own block, and drafting without changing a token."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import CPU, VOCAB, decoder, engine, pool_for, request, run
from safetensors.torch import load_file, save_file
from test_models import load
from tiny_qwen import head_tensors, random_model, save_model
from torch import Tensor, nn

import forerun
from forerun.cache.pages import PagePool, SequenceCache
from forerun.draft.mtp import MtpDrafter
from forerun.engine.engine import Engine
from forerun.errors import ForerunError
from forerun.kernels.cpu import CpuKernels
from forerun.kernels.interface import AttentionSpec
from forerun.kernels.matrix import TiledMatrix
from forerun.kernels.reference import ReferenceKernels
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.mtp import MtpHead
from forerun.models.layers.rows import make_pass

PROMPT = [11, 22, 33, 44, 55, 66, 77, 88, 99, 111, 122, 133, 144, 155, 166, 177, 188, 199, 210]
ANSWER = 40


class Twin(nn.Module):
    """The head in plain torch, its block transformers' own attention layer."""

    def __init__(self, model: Any, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.model = [model]  # in a list: not a part of this module
        self.block = copy.deepcopy(model.model.layers[model.config.layer_types.index("full_attention")])
        own = {n.removeprefix("mtp.layers.0."): t for n, t in tensors.items() if n.startswith("mtp.layers.0.")}
        self.block.load_state_dict(own)
        names = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        self.parts = nn.ParameterDict({name: tensors[f"mtp.{name}.weight"].clone() for name in names})

    def normed(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.parts[name])

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Slots 0 … n − 1: the target's hidden states there, and the tokens after them."""
        model = self.model[0]
        embedded = model.model.embed_tokens(tokens)
        pair = [self.normed(embedded, "pre_fc_norm_embedding"), self.normed(hidden, "pre_fc_norm_hidden")]
        x = (torch.cat(pair, dim=1) @ self.parts["fc"].T)[None]
        angles = model.model.rotary_emb(x, torch.arange(len(tokens))[None])
        return self.normed(self.block(x, position_embeddings=angles)[0], "norm")

    def tensors(self) -> dict[str, Tensor]:
        """As a checkpoint holds them."""
        block = {f"mtp.layers.0.{name}": tensor for name, tensor in self.block.state_dict().items()}
        return block | {f"mtp.{name}.weight": tensor.detach() for name, tensor in self.parts.items()}


def native(model: Decoder) -> MtpHead:
    head = model.native_head()
    assert head is not None
    return head


LAYOUTS = {"dense": (False, True), "sparse, fused": (True, True), "sparse, one by one": (True, False)}


@pytest.mark.parametrize("kernels", [CpuKernels(False), ReferenceKernels()], ids=["cpu", "reference"])
@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_the_head_agrees_with_its_twin(layout: str, kernels: Any, tmp_path: Path) -> None:
    sparse, fused = LAYOUTS[layout]
    oracle = random_model(sparse)
    head = native(load(save_model(tmp_path, oracle, fused=fused), kernels))
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 250, (30,), generator=generator)
    hidden = torch.randn(30, 48, generator=generator)
    expected = Twin(oracle, head_tensors(oracle, fused=True))(hidden, tokens)
    cache, parts, start = SequenceCache(PagePool([AttentionSpec(head.layout)], 8, 8, torch.float32, CPU)), [], 0
    cache.grow(30)
    for stop, prefill in [(11, True), (20, True), (21, False), (24, False), (30, False)]:
        batch = make_pass([(cache, tokens[start:stop].tolist())], last_only=False, prompt=prefill)
        parts.append(head.forward(hidden[start:stop], batch))
        cache.commit(stop - start)
        start = stop
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(head.logits(expected), oracle.lm_head(expected), atol=1e-4, rtol=0)


def test_what_is_never_quantised(tmp_path: Path) -> None:
    model = decoder(save_model(tmp_path, random_model(True)), quantize=True)
    head = native(model)
    mixer, sparse = model.layers[0].mixer, model.layers[0].feed_forward
    for matrix in (head.fc, mixer.gates, sparse.router, sparse.shared_gate):
        assert isinstance(matrix, TiledMatrix) and matrix.exact
    for vector in (mixer.convolution, mixer.decay.rate, mixer.decay.bias, mixer.norm):
        assert vector.dtype == torch.float32
    assert isinstance(mixer.project, TiledMatrix) and not mixer.project.exact


def learn(oracle: Any, text: Tensor, hidden: Tensor) -> dict[str, Tensor]:
    """A head that has learnt one text by heart."""
    head = Twin(oracle, head_tensors(oracle, fused=True))
    optimiser = torch.optim.Adam(head.parameters(), lr=0.01)
    for _ in range(60):
        logits = head(hidden[:-2], text[1:-1]) @ oracle.lm_head.weight.T
        loss = nn.functional.cross_entropy(logits, text[2:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss < 1, "the head has learnt nothing"
    return head.tensors()


@pytest.fixture(scope="module", params=["dense int8", "sparse int8", "dense float32", "sparse float32"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Decoder]:
    """A model whose head knows what the model says after one prompt, in the precision it will run in."""
    kind, precision = request.param.split()
    oracle = random_model(kind == "sparse")
    folder = save_model(tmp_path_factory.mktemp("trained"), oracle, head=False, nested=True)
    quantize = precision == "int8"
    model = decoder(folder, quantize)
    text = say(model)
    cache = SequenceCache(pool_for(model))
    cache.grow(len(text))
    with torch.no_grad():
        hidden = model.forward(make_pass([(cache, text)], last_only=False, features=True)).features
    tensors = load_file(folder / "model.safetensors") | learn(oracle, torch.tensor(text), hidden)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder, decoder(folder, quantize)


def say(model: Decoder) -> list[int]:
    (sequence,) = run(engine(model), request(PROMPT, max_tokens=ANSWER + 8))
    return sequence.tokens


@pytest.fixture(scope="module")
def model(trained: tuple[Path, Decoder]) -> Decoder:
    return trained[1]


def with_head(model: Decoder) -> Engine:
    return engine(model, beside=[MtpDrafter(native(model), VOCAB)])


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 5, "top_p": 0.95}], ids=["greedy", "sampled"])
def test_same_tokens_at_every_depth(model: Decoder, options: dict[str, Any]) -> None:
    asked = {"max_tokens": ANSWER, **options}
    (plain,) = run(engine(model), request(PROMPT, **asked))
    best = 0
    for depth in range(1, 7):
        (sequence,) = run(with_head(model), request(PROMPT, draft="mtp", draft_tokens=depth, **asked))
        assert sequence.tokens == plain.tokens and not sequence.warnings
        assert sequence.counters.drafted > 0
        best = max(best, sequence.counters.accepted)
    if not options:
        assert len(set(plain.tokens)) > 10
        assert best >= ANSWER // 3, "drafts must be accepted for this to mean much"


def test_same_tokens_in_a_mixed_batch(model: Decoder) -> None:
    sampled = {"temperature": 0.8, "seed": 6, "max_tokens": 25}
    plain = [
        run(engine(model), request(PROMPT, max_tokens=ANSWER))[0].tokens,
        run(engine(model), request(PROMPT[::-1], **sampled))[0].tokens,
    ]
    sequences = run(
        with_head(model),
        request(PROMPT, max_tokens=ANSWER),
        request(PROMPT, max_tokens=ANSWER, draft="mtp", draft_tokens=4),
        request(PROMPT[::-1], draft="mtp", draft_tokens=3, **sampled),
        request(PROMPT, max_tokens=ANSWER, draft="lookup"),
        request(PROMPT, max_tokens=ANSWER, draft="mtp", draft_tokens=1),
    )
    assert [s.tokens for s in sequences] == [plain[0], plain[0], plain[1], plain[0], plain[0]]


def test_rejection_is_exact_in_distribution(model: Decoder) -> None:
    from heads import joint
    from test_sample_acceptance import chi_square, fits

    settings: dict[str, Any] = {"temperature": 1.3, "top_k": 3, "accept": "rejection"}
    seeds = 300
    wanted = [request(PROMPT, max_tokens=3, seed=n, draft="mtp", **settings) for n in range(seeds)]
    answers = [run(with_head(model), *wanted[n : n + 6]) for n in range(0, seeds, 6)]
    flat = [sequence for some in answers for sequence in some]
    drafted, accepted = (sum(getattr(s.counters, name) for s in flat) for name in ("drafted", "accepted"))
    assert seeds / 20 < accepted < drafted
    counts: dict[tuple[int, ...], int] = {}
    for sequence in flat:
        counts[tuple(sequence.answer)] = counts.get(tuple(sequence.answer), 0) + 1
    expected = joint(model, PROMPT, 3, settings)
    assert fits(counts, expected), chi_square(counts, expected)


def test_from_a_folder_to_text(trained: tuple[Path, Decoder]) -> None:
    folder, decoder = trained
    model = forerun.load(str(folder), quantize="int8" if decoder.kernels.quantize else "none")  # type: ignore[attr-defined]
    assert model.probe.guaranteed
    plain = forerun.generate(model, PROMPT, max_tokens=ANSWER, draft="off")
    drafted = forerun.generate(model, PROMPT, max_tokens=ANSWER, draft="mtp", draft_tokens=3)
    assert drafted.draft == "mtp" and drafted.accepted > 0 and drafted.tokens == plain.tokens and drafted.guaranteed
    chosen = forerun.generate(model, PROMPT, max_tokens=ANSWER)  # by measured time: what it drafts is not known
    assert chosen.tokens == plain.tokens and chosen.guaranteed


def stripped(folder: Path, **changes: Any) -> Path:
    """A folder that lost its head; `changes` to config.json."""
    save_model(folder, random_model(False), head=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_a_declared_head_that_is_not_there(tmp_path: Path) -> None:
    folder = stripped(tmp_path)
    with pytest.raises(ForerunError, match=r"declares an MTP head .* no mtp\.\* tensors"):
        decoder(folder, quantize=True).native_head()
    model = forerun.load(str(folder))
    with pytest.raises(ForerunError, match="no mtp"):
        forerun.generate(model, PROMPT, max_tokens=4, draft="mtp")
    assert forerun.generate(model, PROMPT, max_tokens=4).draft != "mtp"


def test_no_head_and_none_declared(tmp_path: Path) -> None:
    assert decoder(stripped(tmp_path, mtp_num_hidden_layers=0), quantize=True).native_head() is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mtp.fc.weight": torch.ones(48, 48)}, r"mtp\.fc\.weight has shape"),
        ({"mtp.norm.weight": None}, r"mtp\.norm\.weight is missing"),
        ({"mtp.layers.0.self_attn.q_proj.weight": torch.ones(64, 48)}, "q_proj.weight has shape"),
        ({"mtp.strange.weight": torch.ones(2)}, r"mtp\.strange"),
        ({"mtp.layers.1.input_layernorm.weight": torch.ones(48)}, "more than one block"),
    ],
)
def test_a_head_that_does_not_fit_is_named(change: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, random_model(False))
    weights: dict[str, Any] = load_file(folder / "model.safetensors") | change
    save_file({n: t for n, t in weights.items() if t is not None}, folder / "model.safetensors", {"format": "pt"})
    model = decoder(folder, quantize=True)  # the model itself is fine
    with pytest.raises(ForerunError, match=message):
        model.native_head()
