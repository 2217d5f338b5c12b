"""Other engines on the same prompts: transformers, and llama.cpp where its Python package is installed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from torch import Tensor

from forerun.conversion import convert
from forerun.errors import ForerunError
from forerun.home import expanded
from forerun.language_model import LanguageModel
from forerun.weights.find import BUILT_IN, built_in_file, find


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """Tokens without the end token, seconds from the first token to the last, and seconds in all."""

    tokens: list[int]
    seconds: float
    whole: float
    decoded: int  # tokens after the first, the end token among them


class Peer(Protocol):
    """Answers a prompt given as token ids; made of what the user named as model, whose weights it reads as well."""

    name: str

    def answer(self, prompt: Sequence[int], temperature: float, tokens: int, seed: int) -> PeerAnswer: ...


class TransformersPeer:
    """transformers' own `generate`, float32 on the CPU, bfloat16 elsewhere."""

    name = "transformers"

    def __init__(self, model: str, loaded: LanguageModel) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # ours is on the screen already, or nobody watches
        device = loaded.machine.device
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.stop_ids = sorted(loaded.stop_ids)
        with folder_of(model) as folder:
            self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)

    def answer(self, prompt: Sequence[int], temperature: float, tokens: int, seed: int) -> PeerAnswer:
        ids = torch.tensor([list(prompt)], device=self.model.device)
        marks: list[float] = []
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(seed)
        began = time.perf_counter()
        found = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            eos_token_id=self.stop_ids,
            pad_token_id=self.stop_ids[0] if self.stop_ids else None,
            streamer=_Clock(marks),
            **sampling,
        )
        answer = found[0, len(prompt) :].tolist()
        # The first mark is the prompt, the second the first token.
        seconds, whole = marks[-1] - marks[1], marks[-1] - began
        return PeerAnswer(_without_end(answer, self.stop_ids), seconds, whole, len(answer) - 1)


class _Clock:
    """A streamer that notes when tokens come."""

    def __init__(self, marks: list[float]) -> None:
        self.marks = marks

    def put(self, value: Tensor) -> None:  # noqa: ARG002
        self.marks.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to finish."""


class LlamaCppPeer:
    """llama.cpp through llama-cpp-python, on the very GGUF file forerun reads."""

    name = "llama.cpp"

    def __init__(self, model: str, loaded: LanguageModel) -> None:
        try:
            from llama_cpp import Llama
        except ImportError:
            raise ForerunError("llama.cpp is not installed: pip install llama-cpp-python") from None
        file = gguf_file(model)
        self.stop_ids = sorted(loaded.stop_ids)
        build: Callable[..., Any] = Llama
        self.model = build(
            model_path=str(file), n_ctx=loaded.engine.context, n_threads=torch.get_num_threads(), verbose=False
        )

    def answer(self, prompt: Sequence[int], temperature: float, tokens: int, seed: int) -> PeerAnswer:
        self.model.reset()
        self.model.set_seed(seed)
        answer: list[int] = []
        began = first = last = time.perf_counter()
        for token in self.model.generate(list(prompt), temp=temperature, top_k=0, top_p=1.0, min_p=0.0):
            last = time.perf_counter()
            first = first if answer else last
            answer.append(int(token))
            if len(answer) == tokens or token in self.stop_ids:
                break
        return PeerAnswer(_without_end(answer, self.stop_ids), last - first, last - began, max(0, len(answer) - 1))


@contextmanager
def folder_of(model: str) -> Iterator[Path]:
    """A folder with the weights as safetensors, for as long as the block lasts."""
    found = find(model)
    if found.is_dir():
        yield found
        return
    with TemporaryDirectory() as place:
        yield convert(model, Path(place, "model")).folder


def gguf_file(model: str) -> Path:
    """The GGUF file behind what the user named."""
    path = built_in_file(model) if model in BUILT_IN else expanded(model)
    if path.suffix.lower() != ".gguf" or not path.is_file():
        raise ForerunError(f"llama.cpp reads GGUF files, and {model!r} is none: name one with -m FILE.gguf")
    return path


def _without_end(tokens: list[int], stop_ids: Sequence[int]) -> list[int]:
    return tokens[:-1] if tokens and tokens[-1] in stop_ids else tokens


PEERS: dict[str, Callable[[str, LanguageModel], Peer]] = {peer.name: peer for peer in (TransformersPeer, LlamaCppPeer)}
