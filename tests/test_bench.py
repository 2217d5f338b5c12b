"""`forerun bench`: its prompts, its figures, and that it keeps quiet about speed where texts differ."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tiny import tiny_gguf, tiny_model

import forerun
from forerun.bench import plot, runner
from forerun.bench.__main__ import main as run_suite
from forerun.bench.peers import PEERS, LlamaCppPeer, TransformersPeer, gguf_file
from forerun.bench.report import against_best, print_report, row, summary, to_data
from forerun.bench.runner import PLAIN, Cell, MeasuredRun, WorkloadRunner, arms_of
from forerun.bench.statistics import Turns, geometric_mean, median
from forerun.bench.suites import engine, mtp, work
from forerun.bench.workloads import ANSWER_TOKENS, Workload, WorkloadPrompt, load_workloads
from forerun.cli.main import main
from forerun.errors import ForerunError
from forerun.language_model import LanguageModel
from forerun.progress import NullProgress
from forerun.tables import output_console
from forerun.train.prompts.questions import Question

FIELDS = {
    "workload", "arm", "temperature", "tokens_per_second", "ratio", "tokens_per_round", "accepted_per_position",
    "equal", "total", "interval",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def model(folder: Path) -> LanguageModel:
    return forerun.load(str(folder))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few prompts and short answers."""
    monkeypatch.setattr(work, "PAIRS", 2)
    monkeypatch.setattr(runner, "WARM_UP_TOKENS", 2)
    for name in ANSWER_TOKENS:
        monkeypatch.setitem(ANSWER_TOKENS, name, 8)


def test_ten_workloads_of_twelve_prompts_with_ids() -> None:
    workloads = load_workloads()
    assert len(workloads) == 10
    ids = [prompt.id for workload in workloads for prompt in workload.prompts]
    contents = [json.dumps(prompt.content) for workload in workloads for prompt in workload.prompts]
    assert len(set(ids)) == len(ids) and len(set(contents)) == len(contents)
    for workload in workloads:
        assert len(workload.prompts) >= 12, workload.name
        assert all(prompt.id.startswith(workload.name) for prompt in workload.prompts)
    chats = next(workload for workload in workloads if workload.name == "chat")
    for prompt in chats.prompts:
        assert isinstance(prompt.content, list)
        assert [message["role"] for message in prompt.content[-3:]] == ["user", "assistant", "user"]


def test_a_sample_is_spread_over_the_workload() -> None:
    (workload,) = load_workloads(["questions"])
    assert [prompt.id for prompt in workload.sample(3).prompts] == ["questions-01", "questions-05", "questions-10"]
    assert workload.sample(99) is workload


def test_an_unknown_workload_is_refused_before_loading(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "-m", "/nowhere", "--workload", "poems"]) == 2
    assert "questions, writing" in capsys.readouterr().err


def test_medians_and_intervals() -> None:
    found = median([1.0, 2.0, 3.0, 4.0, 100.0])
    assert found.value == 3.0 and 1.0 <= found.low < 3.0 < found.high <= 100.0
    assert median([2.0] * 5) == median([2.0] * 7) and str(median([2.0])) == "2.00 (2.00–2.00)"
    mean = geometric_mean([[1.0] * 5, [4.0] * 5])
    assert mean.value == pytest.approx(2.0) == mean.low == mean.high


def cell(arm: str = "auto", equal: int = 2, **values: Any) -> Cell:
    runs = [MeasuredRun([1, 2, 3], 0.5, 0.7, 2, 1, [[2, 1], [1, 0]]), MeasuredRun([4, 5, 6], 0.5, 0.7, 1, 1, [[1, 1]])]
    return Cell("edit", arm, 0.0, runs, [2.0, 3.0], [1.5, 2.0], equal, **values)


def test_a_cell_adds_up() -> None:
    mine = cell()
    assert mine.tokens_per_second == pytest.approx(4.0)  # the first token of an answer comes out of the prompt
    assert mine.tokens_per_round == pytest.approx(5 / 3)
    assert mine.accepted_per_position == [pytest.approx(2 / 3), 0.0]
    assert mine.ratio is not None and mine.ratio.value == 2.5


def test_no_speed_up_for_texts_that_differ() -> None:
    """The mutation that matters: one text of two is another one."""
    broken = cell(equal=1)
    assert broken.ratio is None and broken.whole_ratio is None
    assert to_data([broken])[0]["ratio"] is None
    assert row(broken, 1.0)[3:5] == ["–", "–"]
    assert summary([cell(), broken])[0] == "auto: 3 of 4 texts equal, so no ratio"
    console = Console(record=True, width=200)
    print_report([cell(PLAIN), broken], 1.0, console)
    printed = console.export_text()
    assert (
        "1 of 2" in printed and "no ratio where the texts differ" in printed and "1.50" not in printed.split("auto")[1]
    )


def test_no_figure_is_cut_to_fit_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for columns, lined in (("60", False), ("190", True)):
        monkeypatch.setenv("COLUMNS", columns)
        print_report([cell(PLAIN), cell()], 1.0, output_console())
        printed = capsys.readouterr().out
        assert "2.50 (2.00–3.00)" in printed and "…" not in printed.replace("2, …", "") and ("┏" in printed) == lined


def test_auto_is_set_beside_the_best_single_arm_prompt_by_prompt() -> None:
    def arm(name: str, ratios: list[float]) -> Cell:
        return Cell("edit", name, 0.0, [MeasuredRun([1, 2], 0.5, 0.7)] * 3, ratios, ratios, 3)

    cells = [arm(PLAIN, [1.0] * 3), arm("lookup", [1.0, 2.0, 4.0]), arm("mtp", [1.5] * 3), arm("auto", [0.9, 1.8, 3.6])]
    assert against_best(cells) == "auto over the best single arm: edit 0.90 (0.90–0.90) lookup"
    losing = [arm("lookup", [0.9] * 3), arm("auto", [0.99] * 3)]
    assert against_best(losing) == "auto over the best single arm: edit 0.99 (0.99–0.99) plain"
    assert against_best([arm("lookup", [2.0] * 3)]) is None


def test_every_drafter_that_is_loaded_is_an_arm() -> None:
    """Gemma 4's assistants were left out."""
    model: Any = SimpleNamespace(engine=SimpleNamespace(drafters={"assistant": None, "lookup": None}))
    assert arms_of(model) == {name: {"draft": name} for name in ("lookup", "assistant", "auto")}
    cells = [
        Cell("edit", name, 0.0, [MeasuredRun([1, 2], 0.5, 0.7)], [2.0], [2.0], 1) for name in ("assistant", "auto")
    ]
    assert against_best(cells) == "auto over the best single arm: edit 1.00 (1.00–1.00) assistant"


def test_data_has_exactly_the_documented_fields() -> None:
    (entry,) = to_data([cell()])
    assert (
        set(entry) == FIELDS
        and entry["ratio"] == 2.5
        and len(entry["interval"]) == 2
        and (entry["equal"], entry["total"]) == (2, 2)
    )


class Scripted:
    """Stands in for the model: plain decoding takes a second per answer, `auto` half of one."""

    def __init__(self, wrong: str | None = None) -> None:
        self.order: list[str] = []
        self.wrong = wrong

    def run(self, arm: str, prompt: WorkloadPrompt, temperature: float, tokens: int, seed: int) -> MeasuredRun:
        self.order.append(arm)
        text = [7] if arm == self.wrong else [1, 2, 3]
        return MeasuredRun([*text, seed], 0.5 if arm == "auto" else 1.0, 2.0, 3, 1, [[3, 1]])


def scripted_runner(script: Scripted, monkeypatch: pytest.MonkeyPatch, price: float = 1.0) -> WorkloadRunner:
    mine = WorkloadRunner(None, {"lookup": {}, "auto": {}}, [], price, NullProgress())  # type: ignore[arg-type]
    monkeypatch.setattr(mine, "_ours", script.run)
    return mine


WORK = Workload("edit", 8, tuple(WorkloadPrompt(f"edit-{n}", "hello") for n in range(4)))


def test_arms_are_interleaved_with_plain_decoding_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted()
    cells = scripted_runner(script, monkeypatch).measure([WORK], [0.0])
    assert script.order[3:] == [*("plain", "lookup", "auto", "plain"), *("plain", "auto", "lookup", "plain")] * 2
    ratios = {cell.arm: cell.ratio.value for cell in cells if cell.ratio is not None}
    assert ratios == {"plain": 1.0, "lookup": 1.0, "auto": 2.0}
    assert [cell.total for cell in cells] == [4, 4, 4]


def test_plain_is_counted_as_if_exactness_were_free(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = scripted_runner(Scripted(), monkeypatch, price=1.25).measure([WORK], [0.0])
    ratios = {cell.arm: cell.ratio.value for cell in cells if cell.ratio is not None}
    assert ratios == {"plain": 1.0, "lookup": 0.8, "auto": 1.6}


def test_a_wrong_text_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = scripted_runner(Scripted(wrong="auto"), monkeypatch).measure([WORK], [0.0])
    assert {cell.arm: (cell.equal, cell.ratio is None) for cell in cells} == {
        "plain": (4, False), "lookup": (4, False), "auto": (0, True),
    }  # fmt: skip


def test_the_command_prints_a_list(folder: Path, small: None, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "-m", str(folder), "--workload", "questions", "--workload", "repeat", "--json"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    entries = json.loads(out)
    assert err == "" and len(entries) == 2 * 2 * 3  # workloads, temperatures, arms
    for entry in entries:
        assert set(entry) == FIELDS and entry["equal"] == entry["total"] == 2
    assert {entry["arm"] for entry in entries} == {"plain", "lookup", "auto"}


def test_the_command_prints_tables_and_draws(
    folder: Path, small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "out.png"
    arguments = ["bench", "-m", str(folder), "-w", "questions", "--temp", "0", "--plot", str(picture)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "noise floor" in out and "2 of 2" in out and "temperature 0" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("workloads", [["edit"], ["edit", "code", "questions", "writing"]])
def test_the_legend_of_a_plot_covers_neither_title_nor_bars(workloads: list[str]) -> None:
    arms = [PLAIN, "lookup", "mtp", "model", "auto", "transformers", "llama.cpp"]
    cells = [
        Cell(name, arm, 0.0, [MeasuredRun([1, 2], 0.5, 0.7)], [1.5], [1.5], 1) for name in workloads for arm in arms
    ]
    figure = plot.picture(cells)
    figure.draw_without_rendering()
    (panel,) = figure.axes
    title, legend = panel._left_title.get_window_extent(), panel.get_legend().get_window_extent()
    assert not legend.overlaps(title) and not legend.overlaps(panel.get_window_extent())
    assert legend.x1 <= figure.bbox.x1
    plot.pyplot().close(figure)


def test_a_plot_that_cannot_be_drawn_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "-m", "/nowhere", "--plot", str(tmp_path / "out.png")]) == 2
    assert "forerun[plot]" in capsys.readouterr().err
    monkeypatch.setattr(plot, "pyplot", lambda: None)
    assert main(["bench", "-m", "/nowhere", "--plot", str(tmp_path / "no" / "out.png")]) == 2
    assert "no folder" in capsys.readouterr().err
    monkeypatch.undo()
    for name in ("out", "out.abc"):
        assert main(["bench", "-m", "/nowhere", "--plot", str(tmp_path / name)]) == 2
        assert "end the name with the kind of picture" in capsys.readouterr().err


def test_what_the_model_cannot_be_asked_is_refused_at_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small context, or no chat template, ended a run in the middle, and what had been measured was lost."""
    monkeypatch.setattr(WorkloadRunner, "measure", None)  # calling it would fail
    assert main(["bench", "-m", str(folder), "-w", "questions", "-w", "quote"]) == 2
    assert "workload quote has a prompt of 1" in (told := capsys.readouterr().err) and "context holds 512" in told
    plain = Path(shutil.copytree(folder, tmp_path / "plain"))
    (plain / "chat_template.jinja").unlink()
    assert main(["bench", "-m", str(plain), "-w", "questions", "-w", "chat"]) == 2
    assert "workload chat: this model has no chat template" in capsys.readouterr().err


def test_transformers_answers_the_same_prompts(folder: Path, model: LanguageModel) -> None:
    peer = PEERS["transformers"](str(folder), model)
    assert isinstance(peer, TransformersPeer)
    prompt = list(model.tokenizer("hello there")["input_ids"])
    answer = peer.answer(prompt, 0.0, 6, 0)
    assert 0 < len(answer.tokens) <= 6 and 0 <= answer.seconds < answer.whole
    assert peer.answer(prompt, 0.8, 6, 1).tokens == peer.answer(prompt, 0.8, 6, 1).tokens


def test_llama_cpp_reads_the_same_file(
    folder: Path, model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(ForerunError, match="pip install llama-cpp-python"):
        PEERS["llama.cpp"](str(folder), model)
    made: dict[str, Any] = {}

    class Llama:
        def __init__(self, **settings: Any) -> None:
            made.update(settings)

        def reset(self) -> None: ...

        def set_seed(self, seed: int) -> None:
            made["seed"] = seed

        def generate(self, tokens: list[int], **sampling: Any) -> Any:
            made.update(sampling, prompt=tokens)
            return iter([7, 8, 9, min(model.stop_ids), 7])

    module = ModuleType("llama_cpp")
    module.Llama = Llama  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    with pytest.raises(ForerunError, match="GGUF"):
        PEERS["llama.cpp"](str(folder), model)
    file = tiny_gguf(tmp_path / "tiny.gguf", folder)
    peer = PEERS["llama.cpp"](str(file), model)
    assert isinstance(peer, LlamaCppPeer) and made["model_path"] == str(file)
    assert peer.answer([1, 2], 0.8, 10, 5).tokens == [7, 8, 9]  # the end token is not part of it
    assert peer.answer([1, 2], 0.8, 2, 5).tokens == [7, 8]
    assert (made["temp"], made["seed"], made["prompt"]) == (0.8, 5, [1, 2])
    assert gguf_file(str(file)) == file and set(PEERS) == {"transformers", "llama.cpp"}


def test_ratios_of_turns_are_between_neighbours() -> None:
    turns = Turns()
    for factor in (1.0, 10.0, 100.0):  # a machine that drifts
        turns.note(ours=2 * factor)
        turns.note(theirs=factor)
    assert turns.ratio("ours", "theirs") == 2.0 and turns.median("ours") == 20.0


@pytest.mark.parametrize("suite", ["gpu", "gpu-batches"])
def test_suites_for_a_gpu_say_that_there_is_none(
    suite: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as caught:
        run_suite([suite])
    assert caught.value.code == 2 and capsys.readouterr().err == "this measures an NVIDIA GPU, and torch sees none\n"


def test_an_unknown_suite_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_suite(["poems"])
    assert "invalid choice: 'poems'" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--model", "nowhere"], ["--clients", "1,many"]])
def test_mistakes_in_a_suite_are_one_line(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_suite(["http", *options])
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == "" and err.count("\n") == 1 and options[1] in err


def test_the_engine_suite_ends_with_its_figures_as_json(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "REPEATS", 1)
    monkeypatch.setattr(engine, "second_start", lambda: 1.0)
    monkeypatch.setattr(engine.Bench.__init__, "__defaults__", (str(folder),))
    monkeypatch.setattr(engine.Bench, "our_prefill", lambda bench, draft="off": 1.0)  # there is no head, and no room
    run_suite(["engine"])
    lines = capsys.readouterr().out.splitlines()
    figures = json.loads(lines[-1])
    assert set(engine.GOALS) < set(figures) and figures["guaranteed"]
    assert set(figures["tokens_per_second"]) == {"plain", "transformers", "plain, edit", "lookup, edit"}
    assert lines[0].startswith("plain_vs_transformers ") and lines[0].endswith("≥ 2")


def test_the_suite_of_the_head_measures_acceptance_and_speed(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp, "ARMS", {"lookup": {"draft": "lookup", "draft_tokens": 2}})
    monkeypatch.setattr(runner, "WARM_UP_TOKENS", 2)
    asked = [Question("everyday", "chat", "hello", long=False), Question("everyday", "code", "go go go", long=False)]
    figures = mtp.speed(model, asked)
    assert set(figures) == {"lookup", "plain_tokens_per_second"}
    assert set(figures["lookup"]) == {"ratio", "median", "geometric_mean"}
