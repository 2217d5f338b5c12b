"""`forerun generate` in front of a fake library: what it passes on, what it prints where, what it refuses."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

import forerun
from forerun.cli.main import main
from forerun.cli.prompt import require_unicode
from forerun.engine.sequence import ArmUse
from forerun.proof import Proof


@dataclass
class FakeResponse:
    text: str = "Hello, world"
    tokens: list[int] = field(default_factory=lambda: [5, 6, 7])
    finish_reason: str = "stop"
    prompt_tokens: int = 4
    cached_tokens: int = 0
    completion_tokens: int = 6
    rounds: int = 4
    drafted: int = 8
    accepted: int = 2
    seconds: dict[str, float] = field(
        default_factory=lambda: {"load": 0.1, "prefill": 0.2, "decode": 0.5, "draft": 0.1, "verify": 0.4}
    )
    tokens_per_second: float = 12.04
    draft: str = "lookup"
    guaranteed: bool = True
    seed: int = 99
    arms: dict[str, ArmUse] = field(
        default_factory=lambda: {"plain": ArmUse(1, 0, 0, 0.1), "lookup": ArmUse(3, 8, 2, 0.4)}
    )
    tokens_per_round: float = 1.5
    per_position: list[list[int]] = field(default_factory=lambda: [[3, 2], [3, 0], [2, 0]])
    accepted_per_position: list[float] = field(default_factory=lambda: [0.667, 0.0, 0.0])
    seconds_saved: float | None = 0.25
    warnings: list[str] = field(default_factory=list)
    accept: str = "coupled"
    proof: Proof | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class FakeChunk:
    text: str


class FakeLibrary:
    """Stands in for `forerun.load` and `forerun.stream`, and for the answer; remembers how it was called."""

    def __init__(self) -> None:
        self.model: str | None = None
        self.loading: dict[str, Any] = {}
        self.prompt: str | None = None
        self.options: dict[str, Any] = {}
        self.outcome = FakeResponse()
        self.interrupt_after: int | None = None
        self.closed = False

    def load(self, model: str = "smollm2", **loading: Any) -> AbstractContextManager[str]:
        self.model, self.loading = model, loading
        return nullcontext(f"loaded {model}")

    def stream(self, model: str, prompt: str, **options: Any) -> FakeLibrary:
        assert model == f"loaded {self.model}"
        self.prompt, self.options = prompt, options
        return self

    def __enter__(self) -> FakeLibrary:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def __iter__(self) -> Iterator[FakeChunk]:
        for index, piece in enumerate(["Hello", ", wor", "ld", ""]):
            if index == self.interrupt_after:
                self.outcome.finish_reason = "cancelled"
                raise KeyboardInterrupt
            yield FakeChunk(piece)

    def ready_chunks(self) -> Iterator[FakeChunk]:
        yield FakeChunk("l")

    def response(self) -> FakeResponse:
        assert not self.closed
        return self.outcome


def run(line: str) -> int:
    return main(line.split())


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    fake = FakeLibrary()
    monkeypatch.setattr(forerun, "load", fake.load, raising=False)
    monkeypatch.setattr(forerun, "stream", fake.stream, raising=False)
    return fake


def give_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes, terminal: bool = False) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
    monkeypatch.setattr(stdin, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stdin", stdin)


def refuse(argv: list[str], capsys: pytest.CaptureFixture[str], library: FakeLibrary) -> str:
    """The one line of a refusal that comes before any model is loaded."""
    assert main(["generate", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("forerun: ") and err.count("\n") == 1, err
    assert library.model is None, "refused only after loading the model"
    return err


def test_text_goes_to_stdout_and_statistics_to_stderr(library: FakeLibrary, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-p", "Hi"]) == 0
    assert capsys.readouterr() == (
        "Hello, world\n",
        "6 tokens · 12.0 tok/s · 1.50 tokens/round · 25 % of drafts accepted · lookup"
        " · same text as plain decoding: guaranteed\n",
    )
    assert library.closed


def test_each_piece_is_flushed_when_it_comes(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Screen(io.StringIO):
        def flush(self) -> None:
            seen.append(self.getvalue())

    monkeypatch.setattr("sys.stdout", Screen())
    assert main(["generate", "-p", "Hi", "--quiet"]) == 0
    assert seen[:3] == ["Hello", "Hello, wor", "Hello, world"]


def test_defaults_are_the_documented_ones(library: FakeLibrary) -> None:
    assert main(["generate", "-p", "Hi"]) == 0
    progress = library.loading.pop("progress")
    assert library.options.pop("progress") is progress
    with progress.task("loading", 3) as task:
        task.advance()
    assert library.model == "smollm2" and library.prompt == "Hi"
    assert library.loading == {
        "device": "auto", "dtype": "auto", "quantize": "auto", "max_context": None, "memory": None, "draft_model": None,
        "head": "auto", "assistant_position": "n-1", "prefix_cache": True, "slowdown": 2.5,
        "cache": None,
    }  # fmt: skip
    assert library.options == {
        "system": None, "raw": False, "max_tokens": None, "temperature": None, "top_p": None, "top_k": None,
        "min_p": None, "repetition_penalty": None, "presence_penalty": None, "frequency_penalty": None,
        "logit_bias": None, "lang_bias": None, "suppress": None, "stop": None, "seed": None, "draft": "auto",
        "draft_tokens": "auto", "prove": False,
        "accept": "coupled", "images": None, "videos": None, "audio": None,
    }  # fmt: skip


def test_every_flag_reaches_the_library(library: FakeLibrary, tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.mp4", "d.wav"):
        (tmp_path / name).write_bytes(b"data")
    line = (
        "generate -m folder -p Hi --system Be -n 7 --temp 0.7 --top-p 0.9 --top-k 40 --min-p 0.05"
        " --repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.3 --logit-bias 5=-2,7=1.5"
        " --logit-bias 9=3 --lang-bias ja=-inf,zh=-5 --suppress 1,2 --suppress 3 --stop END --stop ### --seed 12"
        " --draft model --draft-model small --draft-tokens 4 --accept rejection --device cuda --dtype bfloat16"
        " --quantize none --max-context 512 --memory 0.5 --no-prefix-cache --slowdown 4 --quiet"
        f" --image {tmp_path}/a.png --image {tmp_path}/b.png --video {tmp_path}/c.mp4 --audio {tmp_path}/d.wav"
    )
    assert run(line) == 0
    del library.loading["progress"], library.options["progress"]
    assert library.loading == {
        "device": "cuda", "dtype": "bfloat16", "quantize": "none", "max_context": 512, "memory": "0.5",
        "draft_model": "small", "head": "auto", "assistant_position": "n-1", "prefix_cache": False, "slowdown": 4.0,
        "cache": None,
    }  # fmt: skip
    assert library.options == {
        "system": "Be", "raw": False, "max_tokens": 7, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
        "logit_bias": {5: -2.0, 7: 1.5, 9: 3.0}, "lang_bias": "ja=-inf,zh=-5", "suppress": frozenset({1, 2, 3}),
        "stop": ["END", "###"], "seed": 12, "draft": "model", "draft_tokens": 4, "accept": "rejection", "prove": False,
        "images": [f"{tmp_path}/a.png", f"{tmp_path}/b.png"], "videos": [f"{tmp_path}/c.mp4"],
        "audio": [f"{tmp_path}/d.wav"],
    }  # fmt: skip


def test_long_names_mean_the_same(library: FakeLibrary) -> None:
    assert run("generate --model folder --prompt Hi --max-tokens 3 --temperature 0.5 --raw --quiet") == 0
    assert (library.model, library.prompt) == ("folder", "Hi")
    assert (library.options["max_tokens"], library.options["temperature"], library.options["raw"]) == (3, 0.5, True)


def test_a_draft_model_is_one_of_the_arms(library: FakeLibrary) -> None:
    assert run("generate -p Hi --draft-model small --quiet") == 0
    assert (library.loading["draft_model"], library.options["draft"]) == ("small", "auto")


def test_a_head_is_handed_over(library: FakeLibrary) -> None:
    assert run("generate -p Hi --head folder --draft mtp --quiet") == 0
    assert (library.loading["head"], library.options["draft"]) == ("folder", "mtp")


def test_json_is_one_object_and_nothing_else(library: FakeLibrary, capsys: pytest.CaptureFixture[str]) -> None:
    library.outcome.text = "Grüße 🙂"
    assert main(["generate", "-p", "Hi", "--json"]) == 0
    out, err = capsys.readouterr()
    expected = asdict(library.outcome)
    assert expected.pop("warnings") == []  # goes to stderr
    del expected["per_position"]  # counts; shares are printed
    assert json.loads(out) == expected
    assert out.count("\n") == 1 and "Grüße 🙂" in out and err == ""


def test_explain_adds_a_table_about_the_arms(library: FakeLibrary, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-p", "Hi", "--explain", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert out == "Hello, world\n"
    lines = [line.split() for line in err.splitlines()]
    assert lines[0] == ["arm", "rounds", "drafts/round", "accepted", "tokens/round", "ms/token"]
    assert ["plain", "1", "–", "–", "1.00", "100.0"] in lines
    assert ["lookup", "3", "2.7", "25", "%", "1.67", "80.0"] in lines
    assert "67 0 0" in err and "drafting and deciding 0.10 s, verifying 0.40 s" in err and "0.25 s" in err


def test_explain_without_any_round(library: FakeLibrary, capsys: pytest.CaptureFixture[str]) -> None:
    library.outcome.arms, library.outcome.per_position, library.outcome.seconds_saved = {}, [], None
    assert main(["generate", "-p", "Hi", "--explain"]) == 0
    assert "saved" not in capsys.readouterr().err


def test_quiet_prints_the_text_alone(library: FakeLibrary, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-p", "Hi", "--quiet"]) == 0
    assert capsys.readouterr() == ("Hello, world\n", "")


@pytest.mark.parametrize("silencer", ["--quiet", "--json"])
def test_a_missing_guarantee_is_said_even_when_silent(
    silencer: str, library: FakeLibrary, capsys: pytest.CaptureFixture[str]
) -> None:
    library.outcome.guaranteed = False
    assert main(["generate", "-p", "Hi", silencer]) == 0
    assert "NOT guaranteed" in capsys.readouterr().err


def test_warnings_of_the_engine_reach_stderr(library: FakeLibrary, capsys: pytest.CaptureFixture[str]) -> None:
    library.outcome.warnings = ["the drafter failed"]
    assert main(["generate", "-p", "Hi", "--quiet"]) == 0
    assert capsys.readouterr() == ("Hello, world\n", "forerun: warning: the drafter failed\n")


def test_a_missing_guarantee_is_in_the_statistics(library: FakeLibrary, capsys: pytest.CaptureFixture[str]) -> None:
    library.outcome.guaranteed = False
    assert main(["generate", "-p", "Hi"]) == 0
    assert "NOT GUARANTEED" in capsys.readouterr().err.splitlines()[0]


def test_rejection_promises_only_the_distribution(library: FakeLibrary, capsys: pytest.CaptureFixture[str]) -> None:
    library.outcome.guaranteed = False
    assert main(["generate", "-p", "Hi", "--accept", "rejection", "--temp", "1"]) == 0
    err = capsys.readouterr().err
    assert "not promised (rejection keeps the distribution)" in err and "WARNING" not in err


def test_a_sampled_answer_names_its_seed(library: FakeLibrary, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-p", "Hi", "--temp", "0.5"]) == 0
    assert "seed 99" in capsys.readouterr().err


def test_plain_decoding_reports_no_drafts(library: FakeLibrary, capsys: pytest.CaptureFixture[str]) -> None:
    library.outcome = FakeResponse(drafted=0, accepted=0, rounds=0, draft="off", completion_tokens=1)
    assert main(["generate", "-p", "Hi", "--draft", "off"]) == 0
    assert "1 token · 12.0 tok/s · no drafts · plain decoding · same text" in capsys.readouterr().err


def test_an_interrupt_keeps_the_text_and_says_how_far_it_got(
    library: FakeLibrary, capsys: pytest.CaptureFixture[str]
) -> None:
    library.interrupt_after = 2
    assert main(["generate", "-p", "Hi"]) == 130
    out, err = capsys.readouterr()
    assert out == "Hello, worl\n"  # with what the interrupted round gave
    assert err.startswith("interrupted · 6 tokens · 12.0 tok/s · ")
    assert library.closed


def test_an_interrupt_in_json_mode_prints_what_there_is(
    library: FakeLibrary, capsys: pytest.CaptureFixture[str]
) -> None:
    library.interrupt_after = 2
    assert main(["generate", "-p", "Hi", "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["finish_reason"] == "cancelled"


def test_the_prompt_comes_from_stdin(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    give_stdin(monkeypatch, "Grüße\n\n".encode())
    assert main(["generate", "-p", "-"]) == 0
    assert library.prompt == "Grüße\n"


def test_the_prompt_comes_from_a_file(library: FakeLibrary, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"one\r\ntwo\r\n")
    assert main(["generate", "--prompt-file", str(file)]) == 0
    assert library.prompt == "one\r\ntwo"


@pytest.mark.parametrize(("terminal", "words"), [(True, "give one with -p TEXT"), (False, "use -p -")])
def test_no_prompt_is_refused(
    terminal: bool,
    words: str,
    library: FakeLibrary,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    give_stdin(monkeypatch, b"ignored", terminal)
    assert words in refuse([], capsys, library)


def test_unreadable_prompts_are_refused(
    library: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"ab\xff")
    assert "not UTF-8" in refuse(["--prompt-file", str(binary)], capsys, library)
    assert "cannot read" in refuse(["--prompt-file", str(tmp_path / "absent")], capsys, library)
    assert "cannot read" in refuse(["--prompt-file", str(tmp_path)], capsys, library)
    assert "exclude" in refuse(["--prompt-file", str(binary), "-p", "x"], capsys, library)
    assert "not UTF-8" in refuse(["-p", "\udcff"], capsys, library)
    assert require_unicode("\udcc3\udcbc!", "--prompt") == "ü!"  # UTF-8 that was typed where the locale is another one
    give_stdin(monkeypatch, b"\n")
    assert "empty" in refuse(["-p", "-"], capsys, library)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--draft model", "--draft-model"),
        ("--draft off --draft-model small", "uses no draft model"),
        ("--draft lookup --draft-model small", "uses no draft model"),
        ("--draft lookup --head folder", "uses no MTP head"),
        ("--head folder --draft-model small", "two drafters"),
        ("--head=", "--head"),
        ("--raw --system Be", "--system"),
        ("--draft-tokens 0", "--draft off"),
        ("--draft-tokens -3", "--draft-tokens -3"),
        ("--draft-tokens many", "auto"),
        ("--max-tokens 0", "--max-tokens 0"),
        ("-n -4", "--max-tokens -4"),
        ("--max-context 0", "--max-context 0"),
        ("--memory 1.5", "a share of what is free (0.5) or bytes (512M, 6G), not '1.5'"),
        ("--memory much", "not 'much'"),
        ("--logit-bias 5", "ID=BIAS"),
        ("--logit-bias 5=", "ID=BIAS"),
        ("--logit-bias x=1", "ID=BIAS"),
        ("--logit-bias -1=1", "ID=BIAS"),
        ("--logit-bias 5=1,", "ID=BIAS"),
        ("--logit-bias 5=1 --logit-bias 5=2", "twice"),
        ("--suppress x", "--suppress x"),
        ("--suppress -2", "--suppress -2"),
        ("--stop=", "--stop"),
        ("--temp -1", "temperature"),
        ("--temp nan", "temperature"),
        ("--temp inf", "temperature"),
        ("--top-p -0.1", "top_p"),
        ("--top-p 1.5", "top_p"),
        ("--top-k -1", "top_k"),
        ("--min-p 2", "min_p"),
        ("--repetition-penalty 0", "repetition_penalty"),
        ("--presence-penalty nan", "presence_penalty"),
        ("--logit-bias 5=nan", "bias"),
        ("--lang-bias xx=1", "xx"),
        ("--lang-bias ja", "ja"),
    ],
)
def test_bad_values_are_refused_before_loading(
    flags: str, words: str, library: FakeLibrary, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refuse(["-p", "Hi", *flags.split()], capsys, library)


def test_an_empty_prompt_is_refused(library: FakeLibrary, capsys: pytest.CaptureFixture[str]) -> None:
    assert "empty" in refuse(["-p", ""], capsys, library)


def test_media_that_cannot_be_read_are_refused_before_the_model_loads(
    library: FakeLibrary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.png").touch()
    for flags, words in (
        (["--image", "nowhere.png"], "cannot read the image nowhere.png: No such file"),
        (["--video", str(tmp_path)], "Is a directory"),
        (["--image", str(tmp_path / "empty.png")], "is empty"),
        (["--audio", "https://example.org/a.wav"], "URLs are not fetched"),
    ):
        assert words in refuse(["-p", "Hi", *flags], capsys, library)
