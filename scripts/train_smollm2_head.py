"""Trains the head that forerun ships for SmolLM2-135M-Instruct, on a machine with a CUDA GPU.

    PYTHONPATH=src python3 scripts/train_smollm2_head.py run --model MODEL --out DIR --minutes 16

MODEL is a GGUF file or a model folder. DIR gets head/ (head.safetensors, config.json, evaluation.json, README.md) and
train.log. An interrupted run goes on when it is started again. With --start-from an
existing head is trained further, on new answers. The minutes are for everything, from the start of the program to the
last file: data and training take what time there is, so a slower GPU means fewer steps, not a later end.

Where one command may not run as long as training does, `start` leaves the run in the background and follows its log
for --follow seconds, and `follow` does so again; both copy to DIR what there is when they end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Self

BEGAN = time.monotonic()
LOG, PID, DONE = "train.log", "pid", "done"
SMALL_QUESTIONS = 1  # per category


def main() -> int:
    arguments = parse()
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.action == "run":
        return run(arguments)
    if arguments.action == "start":
        start(arguments)
    return follow(arguments)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "start", "follow"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "smollm2-head")))
    parser.add_argument("--work", type=Path, default=Path("/tmp/smollm2-head-work"))
    parser.add_argument("--minutes", type=float, default=16.0, help="for everything")
    parser.add_argument("--follow", type=float, default=560.0, help="seconds to follow a background run")
    parser.add_argument("--prompts", type=int, default=110_000)
    parser.add_argument("--prompt-files", type=Path, nargs="*", default=[], help="default: built-in prompts")
    parser.add_argument("--start-from", type=Path, help="a head's folder to go on from")
    parser.add_argument("--rate", type=float, help="the highest; default 3e-3, or 5e-4 with --start-from")
    parser.add_argument("--final-rate", type=float, default=0.02, help="share of the highest at the end")
    parser.add_argument("--taps", help="default 3,15,25, or those of --start-from")
    parser.add_argument("--intermediate", type=int)
    parser.add_argument("--data-share", type=float, default=0.25)
    parser.add_argument("--evaluation-share", type=float, default=0.08, help="of the minutes, kept for the end")
    parser.add_argument("--answer-tokens", type=int, default=320)
    parser.add_argument("--greedy", type=float, default=0.5, help="share of greedy answers")
    parser.add_argument("--unroll", type=int, default=5)
    parser.add_argument("--decay", type=float, default=0.8, help="weight of a draft relative to the one before it")
    parser.add_argument("--hard", type=float, default=0.0, help="share of the teacher on its likeliest token alone")
    parser.add_argument("--missed", type=float, default=1.0, help="share of drafts that count after a wrong one")
    parser.add_argument("--average", type=float, default=12.0, help="averages over about 1/(this + 1) of the steps")
    parser.add_argument("--batch-tokens", type=int)
    parser.add_argument("--draft-vocab", type=int, help="ids the head may draft, chosen anew")
    parser.add_argument("--feature-gib", type=float, help="GPU memory for features; default: most of what is free")
    parser.add_argument("--seed", type=int, help="default 0, or 1 with --start-from: other prompts, other answers")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="seconds on a CPU: a test of this script")
    return parser.parse_args()


def run(arguments: argparse.Namespace) -> int:
    """The whole training in this process."""
    from forerun.train.run import train_head
    from forerun.train.settings import Settings

    log = Log(arguments.work / LOG)
    start = arguments.start_from
    taps = arguments.taps if arguments.taps is not None or start else "3,15,25"
    settings = Settings(
        seed=arguments.seed if arguments.seed is not None else int(start is not None),
        start_from=str(start) if start else None,
        minutes=arguments.minutes,
        prompts=32 if arguments.small else arguments.prompts,
        answer_tokens=24 if arguments.small else arguments.answer_tokens,
        evaluation_tokens=12 if arguments.small else 128,
        prompt_tokens=120 if arguments.small else 1600,
        greedy_share=arguments.greedy,
        data_share=arguments.data_share,
        evaluation_share=0.3 if arguments.small else arguments.evaluation_share,
        feature_bytes=int(arguments.feature_gib * (1 << 30)) if arguments.feature_gib else None,
        taps=None if taps is None else tuple(int(tap) for tap in taps.split(",") if tap),
        intermediate=arguments.intermediate,
        unroll=arguments.unroll,
        decay=arguments.decay,
        hard=arguments.hard,
        missed=arguments.missed,
        rate=arguments.rate,
        final_rate=arguments.final_rate,
        average=arguments.average,
        batch_tokens=arguments.batch_tokens,
        draft_vocab=arguments.draft_vocab,
    )
    head = arguments.work / "head"
    try:
        report = train_head(
            arguments.model,
            head,
            settings,
            device=arguments.device,
            prompts=arguments.prompt_files,
            evaluation=few_questions(arguments.work) if arguments.small else None,
            work=arguments.work / "state",
            began=BEGAN,
            progress=log,
            log=log.line,
        )
        log.line(json.dumps(report["draft_vocab"]))
        for line in table(report):
            log.line(line)
    except Exception:
        log.line(traceback.format_exc())
        raise
    finally:
        (arguments.work / DONE).touch()
        copy(arguments)
    return 0


def few_questions(work: Path) -> Path:
    """A part of the held-out prompts, for a test of this script."""
    from forerun.train.prompts.prompt import text_of
    from forerun.train.prompts.questions import read_evaluation

    kinds: dict[str, list[str]] = {}
    for question in read_evaluation(None):
        kinds.setdefault(question.category, []).append(text_of(question.prompt))
    chosen = [(category, prompt) for category, found in kinds.items() for prompt in found[:SMALL_QUESTIONS]]
    file = work / "questions.jsonl"
    lines = (json.dumps({"category": category, "prompt": prompt}) for category, prompt in chosen)
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def table(report: dict) -> list[str]:
    """The figures that decide, in a few lines."""
    lines = [f"{'':39}first  d4     d6     prefix 1-6"]
    for collection, tables in report["evaluation"].items():
        for kind, found in tables.items():
            rows = {"all": found["all"], "without loops": found["without_loops"], "loops": found["loops"]}
            rows |= found.get("by_length", {}) | found["by_category"]
            for name, row in rows.items():
                rates = row["tokens_per_round"]
                prefix = " ".join(f"{share:.2f}" for share in row["prefix"])
                label = f"{collection} {kind} {name} ({row['answers']})"
                lines.append(f"{label[:38]:38} {row['first']:.3f}  {rates['4']:.3f}  {rates['6']:.3f}  {prefix}")
    return lines


def start(arguments: argparse.Namespace) -> None:
    """The run as a process of its own, which outlives this command."""
    (arguments.work / DONE).unlink(missing_ok=True)
    command = [sys.executable, __file__, "run", *sys.argv[2:]]
    with (arguments.work / "output.log").open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
    (arguments.work / PID).write_text(str(process.pid))


def follow(arguments: argparse.Namespace) -> int:
    """Print the log as it grows, until the run has ended or the seconds are over; then copy what there is."""
    until = time.monotonic() + arguments.follow
    process = int((arguments.work / PID).read_text())
    shown = 0
    while True:
        done = (arguments.work / DONE).exists() or not alive(process)
        text = (arguments.work / LOG).read_text() if (arguments.work / LOG).exists() else ""
        print(text[shown:], end="", flush=True)
        shown = len(text)
        if done or time.monotonic() > until:
            break
        time.sleep(1)
    if not (arguments.work / "head" / "config.json").exists():
        output = arguments.work / "output.log"
        print(output.read_text()[-3000:] if output.exists() else "", flush=True)
    interim(arguments)
    copy(arguments)
    print("the run has ended" if done else "the run goes on: call follow", flush=True)
    return 0


def alive(process: int) -> bool:
    """A child that ended unwaited-for is no longer alive either."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process, os.WNOHANG)
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def interim(arguments: argparse.Namespace) -> None:
    """The weights of the last checkpoint, in case the machine goes before the run ends."""
    checkpoint = arguments.work / "state" / "checkpoint.pt"
    if not checkpoint.exists() or (arguments.work / "head" / "config.json").exists():
        return
    import torch
    from safetensors.torch import save_file

    state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.bfloat16().contiguous() for name, tensor in state["average"].items()}
    save_file(weights, arguments.out / "interim.safetensors")
    (arguments.out / "interim.json").write_text(json.dumps(state["record"]))


def copy(arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    for file in (arguments.work / LOG, arguments.work / "output.log"):
        if file.exists():
            shutil.copy(file, arguments.out)
    head = arguments.work / "head"
    if (head / "config.json").exists():
        shutil.copytree(head, arguments.out / "head", dirs_exist_ok=True)


class Log:
    """Lines with the time since the start; also shows progress, as a line every few seconds."""

    def __init__(self, file: Path) -> None:
        self._file, self._began = file, BEGAN

    def line(self, text: str) -> None:
        entry = f"[{time.monotonic() - self._began:6.1f}] {text}\n"
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(entry)
        print(entry, end="", flush=True)

    def task(self, name: str, total: int | None = None) -> Task:
        return Task(self, name, total)


class Task:
    """A piece of work that reports at most every 15 seconds."""

    def __init__(self, log: Log, name: str, total: int | None) -> None:
        self._log, self._name, self._total, self._done, self._said = log, name, total, 0, time.monotonic()

    def advance(self, amount: int = 1) -> None:
        self._done += amount
        if time.monotonic() - self._said > 15:
            self._said = time.monotonic()
            self._log.line(f"{self._name}: {self._done} of {self._total}")

    def __enter__(self) -> Self:
        self._log.line(f"{self._name} ...")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.line(f"{self._name}: done")


if __name__ == "__main__":
    sys.exit(main())
