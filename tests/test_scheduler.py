"""Who gives way when pages run out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import NoText, decoder, engine, request
from tiny import tiny_model

from forerun.engine.sequence import Status


def test_the_youngest_is_parked_and_the_oldest_comes_back_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four answers that grow into a pool too small for them: nobody runs who is younger than somebody parked."""
    monkeypatch.setattr("forerun.engine.scheduler.DEFAULT_ANSWER", 4)
    model = decoder(tiny_model(tmp_path, "llama", num_hidden_layers=1), quantize=False)
    machine = engine(model, pages=22, context=100)
    sequences = [machine.submit(request([7 + n] * 9, max_tokens=None), NoText()) for n in range(4)]
    parked, back = set(), []
    with torch.inference_mode():
        while any(s.status is not Status.FINISHED for s in sequences):
            machine.step()
            out = {s.id for s in sequences if s.status is Status.PARKED}
            back += sorted(parked - out)
            parked = out
            running = [s.id for s in sequences if s.status is Status.RUNNING]
            assert not (running and parked) or max(running) < min(parked)
            for sequence in sequences:
                if sequence.status is Status.FINISHED:
                    machine.release(sequence)
    assert back and back == sorted(back) and sequences[0].id not in back
