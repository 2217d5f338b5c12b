"""The suite of a GPU, on tiny models in the interpreter: its times mean nothing there, but its cells are all there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from device_engines import DEVICE, SLOW

from forerun.bench import gpu_prompts
from forerun.bench.gpu_subjects import Scale, Subject, random_subject
from forerun.bench.suites import gpu, gpu_batches
from forerun.device import Machine
from forerun.engine.sequence import Status
from forerun.kernels.cuda import CudaKernels

# Rows that nobody looks at may overflow; the interpreter says so.
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.usefixtures("fewer_programs"),
    pytest.mark.filterwarnings("ignore:.*encountered in (multiply|reduce|exp)"),
]
TINY = Scale(
    context=160, pages=40, page=16, slots=4, chunk=64, draft_vocabulary=100, short=20, steps=3, repeats=1, gaps=4,
    prompts=(9, 40), crowds=((2, 9), (2, 400)),
)  # fmt: skip
QWEN = {
    "model_type": "qwen3_5_text", "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 48, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "max_position_embeddings": 512, "tie_word_embeddings": True, "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 48, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "max_position_embeddings": 512, "tie_word_embeddings": False, "rope_theta": 1e4,
}  # fmt: skip


def subject_of(config: dict[str, object]) -> Subject:
    machine = Machine(DEVICE, torch.float32, False, CudaKernels(DEVICE), graphs=True)
    return random_subject("tiny", config, None, machine, TINY)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@SLOW
def test_every_part_gives_its_cells(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_prompts, "SEVERAL", 0.0)
    monkeypatch.setattr(gpu, "DEPTH", 2)
    subject = subject_of(QWEN)
    cells = gpu.measure_subject(subject, list(gpu.PARTS), 600)
    assert set(cells) == {
        "floor_ms", "plain_ms", "plain_wall_ms", "plain_over_floor", "host_share", "filtered_wall_ms",
        "filtered_over_plain", "pass_1_ms", "pass_8_ms", "weights_1_gb", "weights_8_gb", "width_8_over_1",
        "weights_8_over_1", "draft_step_ms", "draft_step_over_plain", "mtp_2_ms", "mtp_2_wall_ms", "mtp_2_host_share",
        "prompt_9_ms", "prompt_9_off_over_mtp", "token_behind_9_ms", "prompt_40_ms", "prompt_40_off_over_mtp",
        "token_behind_40_ms", "prompts_2x9_ms", "prompts_2x9_over_one", "beside_40_quiet_p95_ms", "beside_40_p50_ms",
        "beside_40_p95_ms", "beside_40_p95_over_quiet", "beside_40_tokens", "beside_40_first_token_ms",
    }  # fmt: skip
    assert all(value > 0 for name, value in cells.items() if not name.endswith("host_share"))
    assert capsys.readouterr().out.count("\n") == len(cells)
    assert subject.engine.pool.free == subject.engine.pool.count and not subject.engine.scheduler.active


def test_a_part_that_fails_or_has_no_time_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(subject: Subject) -> gpu_prompts.Cells:
        subject.begin(5, 3)
        yield "one_ms", 1.0
        raise ValueError("no such thing")

    subject = subject_of(LLAMA)
    monkeypatch.setitem(gpu.PARTS, "broken", broken)
    assert gpu.measure_subject(subject, ["broken", "prompts", "widths"], 0)["one_ms"] == 1.0
    out, err = capsys.readouterr()
    assert "tiny: broken failed" in out and "no such thing" in err
    assert "tiny: prompts is left out: it took longer than it may" in out and "width_8_over_1" in out
    assert not subject.engine.scheduler.active and not subject.engine.scheduler.waiting


def test_a_batch_is_timed_while_all_of_it_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_batches, "TOKENS", 6)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    engine = subject_of(LLAMA).engine
    pause, paused = engine.pause, []

    def note(sequence: object) -> None:
        paused.append(sequence.status)  # type: ignore[attr-defined]
        pause(sequence)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "pause", note)
    prompts = [tuple(range(5, 5 + length)) for length in (40, 9, 30)]  # more than a pass may have
    rate, answers = gpu_batches.run(engine, prompts, 0)
    assert rate > 0 and max(map(len, answers)) == 6 and min(map(len, answers)) > 1
    assert paused and set(paused) <= {Status.RUNNING, Status.FINISHED}  # none that still reads its prompt
    again = [gpu_batches.run(engine, [prompt], 0)[1][0] for prompt in prompts]
    assert gpu_batches.agree(answers, again) and not gpu_batches.agree([[1, 2]], [[1, 3]])
