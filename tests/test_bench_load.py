"""`forerun bench --load`: loops, figures, how prompts are chosen by the time there is, and an engine under load."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny import tiny_model

import forerun
from forerun.bench import load
from forerun.bench.engine_load import EngineTarget
from forerun.bench.load import ClosedLoop, Job, Jobs, LoadBench, LoadCell, LoadRun, OpenLoop, TimedAnswer, to_data
from forerun.bench.load_report import picture, print_load, row
from forerun.bench.plot import pyplot
from forerun.bench.workloads import ANSWER_TOKENS, Workload, WorkloadPrompt, load_workloads
from forerun.cli.main import main
from forerun.errors import ForerunError
from forerun.language_model import LanguageModel
from forerun.progress import NullProgress

FIELDS = [
    "arm", "temperature", "tokens_per_second", "ratio", "low", "high", "first_token_p50", "first_token_p95",
    "between_tokens_p50", "between_tokens_p95", "prompt_share", "equal", "total",
]  # fmt: skip
JOBS = [Job(str(number), "hi", 1, 0.0, number) for number in range(10)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def model(folder: Path) -> LanguageModel:
    return forerun.load(str(folder))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few prompts and short answers."""
    monkeypatch.setattr(load, "TURNS", 2)
    monkeypatch.setattr(load, "LEAST_JOBS", 2)
    monkeypatch.setattr(load, "JOBS_PER_CLIENT", 1)
    monkeypatch.setattr(load, "LEAST_ARRIVALS", 2)
    monkeypatch.setattr("forerun.cli.bench_load.PROMPT_TOKENS", 6)
    for name in ANSWER_TOKENS:
        monkeypatch.setitem(ANSWER_TOKENS, name, 6)


def test_a_closed_loop_keeps_so_many_busy() -> None:
    now, seen = 0, list[int]()

    async def answer(job: Job, since: float) -> TimedAnswer:
        nonlocal now
        now += 1
        seen.append(now)
        await asyncio.sleep(0.001 * (len(JOBS) - job.seed))  # the first asked is not the first to end
        now -= 1
        return TimedAnswer(job.id, 1, 0.0, [], 1, 0)

    run = asyncio.run(ClosedLoop(3).run(JOBS, answer))
    assert max(seen) == 3 and seen[2:] == [3] * 8 and run.seconds > 0
    assert [answer.text for answer in run.answers] == [job.id for job in JOBS]


def test_an_open_loop_waits_for_no_answer_and_keeps_its_moments() -> None:
    def moments(jobs: Sequence[Job], seconds: float) -> list[float]:
        asked: list[float] = []

        async def answer(job: Job, since: float) -> TimedAnswer:
            asked.append(since)
            time.sleep(seconds)  # as a round of an engine that holds the loop up
            await asyncio.sleep(0.01)
            return TimedAnswer(job.id, 1, time.perf_counter() - since, [], 1, 0)

        began = time.perf_counter()
        run = asyncio.run(OpenLoop(500.0).run(jobs, answer))
        assert [answer.text for answer in run.answers] == [job.id for job in jobs]
        assert max(answer.first for answer in run.answers) > (len(jobs) * seconds) / 4
        return [moment - began for moment in asked]

    quick, slow = moments(JOBS, 0.0), moments(JOBS, 0.005)
    assert len(quick) == len(slow) == 10
    gaps = [after - before for before, after in pairwise(quick)]
    late = [after - before for before, after in pairwise(slow)]
    assert gaps == pytest.approx(late, abs=1e-6) and len(set(gaps)) == 9  # random, and the same again
    others = moments(JOBS[1:], 0.0)
    assert abs((others[1] - others[0]) - gaps[0]) > 1e-6
    many = [Job("x", "hi", 1, 0.0, 5)] * 2000
    assert 3.6 < moments_of(many)[-1] < 4.4  # 2000 at 500 a second


def moments_of(jobs: Sequence[Job]) -> list[float]:
    """When they should be asked for, by a clock that does not wait."""
    found: list[float] = []

    async def answer(job: Job, since: float) -> TimedAnswer:
        found.append(since)
        return TimedAnswer("", 1, 0.0, [], 1, 0)

    async def run() -> None:
        began = time.perf_counter()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(load.asyncio, "sleep", _at_once)
            await OpenLoop(500.0).run(jobs, answer)
        found[:] = [moment - began for moment in found]

    asyncio.run(run())
    return sorted(found)


async def _at_once(_: float) -> None: ...


def run_of(texts: str, seconds: float) -> LoadRun:
    return LoadRun(
        [TimedAnswer(text, 10, 0.1 * (n + 1), [0.01, 0.03], 30, 10) for n, text in enumerate(texts)], seconds
    )


def cell_of(texts: str, *seconds: float, clients: int = 4, arm: str = "auto") -> LoadCell:
    """One whose plain turns took a second each."""
    cell = LoadCell(ClosedLoop(clients), arm, 0.0)
    for took in seconds:
        cell.add(run_of(texts, took), run_of("ab", 1.0))
    return cell


def test_figures_are_of_turns_and_of_all_answers() -> None:
    cell = cell_of("ab", 0.5, 0.8, 1.0)
    (entry,) = to_data([cell])
    assert list(entry) == ["clients", *FIELDS]
    assert entry["tokens_per_second"] == 25.0 and (entry["equal"], entry["total"]) == (6, 6)
    assert (entry["ratio"], entry["low"], entry["high"]) == (1.25, 1.0, 2.0)
    assert entry["first_token_p50"] == pytest.approx(0.15) and entry["first_token_p95"] == pytest.approx(0.2)
    assert entry["between_tokens_p50"] == pytest.approx(0.02) and entry["prompt_share"] == 0.75
    assert row(cell) == ["4 clients", "auto", "25.0", "1.25 (1.00–2.00)", "150 / 200", "20 / 30", "75 %", "6 of 6"]
    opened = LoadCell(OpenLoop(2.5), "off", 0.8)
    opened.add(run_of("ab", 1.0), run_of("ab", 1.0))
    (entry,) = to_data([opened])
    assert list(entry) == ["rate", *FIELDS] and entry["rate"] == 2.5 and row(opened)[0] == "2.5/s"


def test_no_ratio_where_texts_differ() -> None:
    cell = cell_of("ax", 0.5, 0.5)
    (entry,) = to_data([cell])
    assert (entry["ratio"], entry["low"], entry["high"]) == (None, None, None)
    assert (entry["equal"], entry["total"]) == (2, 4) and row(cell)[3] == "–"
    console = Console(record=True, width=200)
    print_load([cell], console)
    assert "no ratio where the texts differ" in console.export_text()


def test_an_answer_of_one_token_has_no_times_between() -> None:
    cell, run = LoadCell(ClosedLoop(1), "off", 0.0), LoadRun([TimedAnswer("a", 1, 0.1, [], 0, 0)], 1.0)
    cell.add(run, run)
    (entry,) = to_data([cell])
    assert entry["between_tokens_p50"] is None and entry["prompt_share"] is None
    assert row(cell)[5:7] == ["– / –", "–"]


def test_jobs_are_of_all_kinds_and_differ() -> None:
    jobs = Jobs(load_workloads())
    everything = jobs.everything()
    assert len(everything) == sum(len(workload.prompts) for workload in jobs.workloads)
    taken = jobs.take(20, 0.8, 10)
    assert len({job.id.split("-")[0] for job in taken[:10]}) == 10 and len({job.id for job in taken}) == 20
    assert [job.seed for job in taken] == list(range(10, 30)) and taken[0].temperature == 0.8
    again = jobs.take(1, 0.8, len(everything))[0]
    assert again.id == jobs.take(1, 0.8)[0].id and again.seed != jobs.take(1, 0.8)[0].seed


class FakeTarget:
    """Answers after a while, arm by arm; remembers what it was asked for."""

    arms = ("off", "lookup", "auto")
    on_cpu = True

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.asked = seconds, list[tuple[str, int]]()

    def prepare(self, jobs: Sequence[Job]) -> None:
        pass

    async def answer(self, job: Job, since: float, arm: str) -> TimedAnswer:
        self.asked.append((arm, job.seed))
        await asyncio.sleep(self.seconds / (2 if arm == "auto" else 1))
        return TimedAnswer(job.id, 8, time.perf_counter() - since, [0.01], 30, 10)


WORK = [Workload("edit", 8, tuple(WorkloadPrompt(f"edit-{n}", "hello") for n in range(4)))]


def measure(target: FakeTarget, minutes: float, clients: list[int], shares: list[float], **more: Any) -> list[LoadCell]:
    bench = LoadBench(target, WORK, minutes=minutes, full=more.get("full", False))
    report = asyncio.run(bench.measure(clients, shares, more.get("temperatures", [0.0]), NullProgress()))
    assert report.dropped == more.get("dropped", 0)
    return report.cells


def test_arms_take_turns_on_the_same_requests() -> None:
    target = FakeTarget()
    cells = measure(target, 1, [2], [])
    asked = target.asked[3 * 2 :]  # one per client and arm warms up
    assert [arm for arm, _ in asked[::20]] == [
        *("off", "lookup", "auto"),
        *("lookup", "auto", "off"),
        *("auto",),
        *("off", "lookup"),
    ]
    for turn in range(3):
        for start in range(60 * turn, 60 * (turn + 1), 20):
            assert sorted(seed for _, seed in asked[start : start + 20]) == list(range(20 * turn, 20 * turn + 20))
    assert [(cell.arm, cell.total, cell.equal) for cell in cells] == [(arm, 60, 60) for arm in FakeTarget.arms]


def test_all_prompts_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "LEAST_JOBS", 1)
    assert measure(FakeTarget(), 1, [1], [])[0].total == 3 * 3
    assert measure(FakeTarget(), 1, [1], [], full=True)[0].total == 3 * 4


def test_open_loops_come_at_shares_of_what_most_clients_got_done() -> None:
    cells = measure(FakeTarget(0.002), 1, [4, 1], [0.5, 1.0])
    plain = {cell.load: cell for cell in cells if cell.arm == "off"}
    most = plain[ClosedLoop(4)].answers_per_second
    assert most > 2 * plain[ClosedLoop(1)].answers_per_second
    opened = [load for load in plain if isinstance(load, OpenLoop)]
    assert [load.rate for load in opened] == [0.5 * most, most]
    assert [cell.arm for cell in cells] == list(FakeTarget.arms) * 4


def test_the_number_of_prompts_keeps_the_time() -> None:
    """20 prompts of 20 ms in 3 turns of 3 arms would take 3 seconds for each of two loads, and there is half a one."""
    began = time.perf_counter()
    cells = measure(FakeTarget(0.02), 0.5 / 60, [1, 4], [])
    assert time.perf_counter() - began < 1.5
    assert 1 <= cells[0].total < 10 and 4 <= cells[3].total < 60
    slow = measure(FakeTarget(0.02), 0.01 / 60, [4, 8], [1.0], dropped=2)  # no time at all: one turn, one answer each
    assert [(cell.load, cell.total) for cell in slow] == [(ClosedLoop(4), 4)] * 3


def test_an_engine_under_load_says_what_it_says_alone(model: LanguageModel) -> None:
    target = EngineTarget(model)
    assert target.arms == ("off", "lookup", "auto") and target.on_cpu
    jobs = [Job(str(n), f"hello go go {n}", 10 + n, 0.7, n) for n in range(6)]
    target.prepare(jobs)
    for arm in target.arms:
        run = asyncio.run(ClosedLoop(3).run(jobs, lambda job, since, arm=arm: target.answer(job, since, arm)))
        for job, answer in zip(jobs, run.answers, strict=True):
            alone = forerun.generate(
                model, job.content, max_tokens=job.max_tokens, temperature=0.7, seed=job.seed, draft="off"
            )
            assert (answer.text, answer.tokens) == (alone.text, alone.completion_tokens)
            assert answer.prompt_rows == alone.prompt_tokens and answer.first > 0
            if arm == "off":
                assert answer.other_rows == alone.rounds and len(answer.gaps) == alone.completion_tokens - 1
            assert len(answer.gaps) < answer.tokens and sum(answer.gaps) <= run.seconds
    drafted = asyncio.run(
        ClosedLoop(1).run([Job("0", "hello go go 0", 60, 0.0, 0)], lambda *a: target.answer(*a, "lookup"))
    )
    (answer,) = drafted.answers
    assert answer.other_rows > len(answer.gaps)  # rows of drafts, and tokens that came at once
    assert model.engine.scheduler.idle


def test_what_an_engine_cannot_be_asked_is_said_beforehand(model: LanguageModel) -> None:
    target = EngineTarget(model)
    with pytest.raises(ForerunError, match=r"prompt long: the prompt has .* the context holds 512"):
        target.prepare([Job("long", "word " * 600, 8, 0.0, 1)])


def test_a_failure_in_an_engine_ends_the_measurement_and_frees_everything(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = EngineTarget(model)
    target.prepare(JOBS)

    async def answer(job: Job, since: float) -> TimedAnswer:
        if job.seed == 3:
            monkeypatch.setattr(model.engine, "step", None)  # the next round cannot be run
        return await target.answer(job, since, "off")

    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(ClosedLoop(2).run(JOBS, answer))
    assert isinstance(load.first_error(caught.value), TypeError)
    monkeypatch.undo()
    assert model.engine.scheduler.idle and not model.engine.scheduler.active


@pytest.mark.usefixtures("short")
def test_the_command_prints_a_list_and_draws(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "load.png"
    given = ["bench", "--load", "-m", str(folder), "-w", "questions", "--clients", "1,2", "--rates", "0.9", "--json"]
    assert main([*given, "--temperature", "0,0.8", "--plot", str(plot)]) == 0
    out, err = capsys.readouterr()
    entries = json.loads(out)
    arms = ("off", "lookup", "auto")
    assert err == "" and plot.read_bytes().startswith(b"\x89PNG")
    loads = [(one.get("clients"), one["temperature"], one["arm"]) for one in entries]
    assert loads == [(n, t, arm) for t in (0.0, 0.8) for n in (1, 2, None) for arm in arms]
    for entry in entries:
        assert list(entry)[1:] == FIELDS and entry["equal"] == entry["total"] > 0 and 0 < entry["prompt_share"] < 1
        assert entry["low"] <= entry["ratio"] <= entry["high"] and ("rate" in entry) != ("clients" in entry)
        assert entry["arm"] != "off" or entry["ratio"] == 1.0


@pytest.mark.usefixtures("short")
def test_the_command_prints_a_table_of_the_users_prompts(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("hello\ngo go go\nwhat now?\n", encoding="utf-8")
    given = ["bench", "--load", "-m", str(folder), "--prompts", str(file), "--temp", "0"]
    assert main(given) == 0
    out, err = capsys.readouterr()
    assert err == "" and "1 client " in out and "16 clients" in out and "/s " in out and "32 clients" not in out
    assert main([*given, "--minutes", "1e-6"]) == 0
    out, err = capsys.readouterr()
    assert "1 client " in out and "4 clients" not in out
    assert err == "forerun: no time was left for 5 loads: give more with --minutes\n"
    file.write_text("hello\n" + "word " * 600, encoding="utf-8")
    assert main(given) == 2
    assert capsys.readouterr().err.startswith("forerun: prompt 2 of mine.txt: the prompt has ")


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").touch()
    for arguments, said in {
        ("--load", "--clients", "0"): "--clients 0",
        ("--load", "--clients", "1,1e3"): "--clients 1,1e3",
        ("--load", "--rates", "1,x"): "--rates 1,x: give numbers above 0",
        ("--load", "--rates", "0"): "--rates 0",
        ("--load", "--rates", "nan"): "--rates nan",
        ("--load", "--minutes", "0"): "--minutes 0: give more than 0",
        ("--load", "--minutes", "nan"): "--minutes nan",
        ("--load", "--temp", "0,hot"): "--temperature hot",
        ("--load", "--temp", "-1"): "--temperature -1",
        ("--load", "--against", "transformers"): "--against compares one answer",
        ("--load", "--prompts", str(tmp_path / "none")): "there is no file or folder",
        ("--load", "--prompts", str(tmp_path / "empty.txt")): "holds no prompts",
        ("--load", "--prompts", "x.txt", "-w", "edit"): "drop one of them",
        ("--load", "-w", "poems"): "questions, writing",
        ("--load", "--plot", "out.abc"): "end the name with the kind of picture",
        ("--clients", "2"): "--clients belongs to --load",
        ("--minutes", "2"): "--minutes belongs to --load",
        ("--prompts", "x.txt"): "--prompts belongs to --load",
    }.items():
        assert main(["bench", "-m", "/nowhere", *arguments]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1, (arguments, err)


def test_a_picture_has_room_for_its_legend_and_leaves_out_what_has_no_ratio() -> None:
    cells = [cell_of("ab", 0.5, 0.7, clients=n, arm=arm) for n in (1, 4) for arm in ("off", "lookup", "mtp")]
    cells.append(cell_of("ax", 0.5, clients=1))
    for rate in (2.0, 4.0):
        opened = LoadCell(OpenLoop(rate), "off", 0.0)
        opened.add(run_of("ab", 1.0), run_of("ab", 1.0))
        cells.append(opened)
    figure = picture(cells)
    figure.draw_without_rendering()
    ratios, _, waits = figure.axes
    assert waits.get_legend().get_window_extent().x1 <= figure.bbox.x1
    shown = {line.get_label(): [float(height) for height in line.get_ydata()] for line in ratios.lines}
    assert shown["mtp"] == pytest.approx([1.714, 1.714], abs=1e-3) and isnan(*shown["auto"])  # texts differ: a gap
    assert ratios.get_ylim()[1] > 2.0  # the highest turn is not cut off
    pyplot().close(figure)
