"""One thread at a time is inside an engine; whoever comes from elsewhere harms nobody."""

from __future__ import annotations

import gc
import threading

import pytest
from engines import NoText, decoder, engine, request, run
from tiny import tiny_model

import forerun
from forerun.engine.engine import Engine
from forerun.engine.sequence import Sequence, Status
from forerun.engine.thread import EngineThread
from forerun.language_model import LanguageModel
from forerun.models.layers.decoder import Decoder

PROMPTS = ["hello there", "one two three", "a b c d e", "what is it"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return forerun.load(str(tiny_model(tmp_path_factory.mktemp("m"), "llama")), dtype="float32")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return decoder(tiny_model(tmp_path_factory.mktemp("t"), "llama", num_hidden_layers=1), quantize=False)


def test_two_threads_may_iterate_at_once(model: LanguageModel) -> None:
    options = {"max_tokens": 40, "temperature": 0.8, "seed": 1, "raw": True}
    alone = [forerun.generate(model, prompt, draft="off", **options).tokens for prompt in PROMPTS]
    found: dict[str, list[int]] = {}

    def ask(prompt: str, draft: str) -> None:
        found[prompt] = forerun.generate(model, prompt, draft=draft, **options).tokens

    arms = ["off", "lookup", "auto", "lookup"]
    threads = [threading.Thread(target=ask, args=pair) for pair in zip(PROMPTS, arms, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[prompt] for prompt in PROMPTS] == alone
    with model.engine.owner:
        model.engine.pool.check([])


def test_a_generation_that_dies_inside_a_round_is_released_after_it(model: LanguageModel) -> None:
    """A collection may come at any moment, in the middle of delivering too: it only leaves a command."""
    options = {"max_tokens": 12, "draft": "lookup", "raw": True}
    plain = forerun.generate(model, PROMPTS[0], **options).tokens
    lost: list[forerun.language_model.Generation] = [forerun.stream(model, PROMPTS[1], **options)]
    next(lost[0])
    sequence = lost[0].sequence
    answer = forerun.stream(model, PROMPTS[0], **options)
    usual = answer.sequence.sink.push

    def push(token: int) -> tuple[str, bool]:
        lost.clear()
        gc.collect()
        assert sequence.cache.pages, "a finaliser only leaves a command"
        answer.sequence.sink.push = usual  # type: ignore[method-assign]
        return usual(token)

    answer.sequence.sink.push = push  # type: ignore[method-assign]
    tokens = [chunk.token for chunk in answer if chunk.token is not None]
    assert tokens == plain and not lost and not sequence.cache.pages
    answer.close()


class Counting(Engine):
    """Notes which threads ran rounds."""

    threads: set[str]

    def step(self) -> None:
        self.threads.add(threading.current_thread().name)
        super().step()


def test_an_engine_on_a_thread_of_its_own(target: Decoder) -> None:
    wishes = [request([5 + n, 6, 7], max_tokens=20, draft="lookup") for n in range(6)]
    alone = [run(engine(target), wish)[0].answer for wish in wishes]
    machine = engine(target)
    machine.__class__ = Counting
    machine.threads = set()  # type: ignore[attr-defined]
    done = threading.Event()
    sequences: list[Sequence] = []

    def delivered() -> None:
        if len(sequences) == len(wishes) and all(s.status is Status.FINISHED for s in sequences):
            done.set()

    thread = EngineThread(machine, delivered)
    sequences += [thread.call(lambda wish=wish: machine.submit(wish, NoText())).result() for wish in wishes]  # type: ignore[misc]
    assert done.wait(30)
    assert [sequence.answer for sequence in sequences] == alone
    for sequence in sequences:
        thread.call(lambda gone=sequence: machine.release(gone)).result()  # type: ignore[misc]
    assert isinstance(thread.call(lambda: 1 // 0).exception(), ZeroDivisionError)
    thread.close()
    machine.pool.check([])
    assert machine.threads == {"forerun engine"}  # type: ignore[attr-defined]
    with pytest.raises(forerun.ForerunError, match="closed"):
        thread.call(lambda: None)


def test_an_inbox_that_is_full_refuses(target: Decoder) -> None:
    machine, going = engine(target), threading.Event()
    thread = EngineThread(machine, lambda: None, capacity=2)
    thread.call(lambda: going.wait(30))
    with pytest.raises(forerun.ForerunError, match="too many"):
        for _ in range(4):
            thread.call(lambda: None)
    going.set()
    thread.close()


def test_whoever_unpauses_looks_when_it_is_inside(target: Decoder) -> None:
    """Another thread may have released the sequence while this one waited for its turn."""
    machine = engine(target)
    sequence = machine.submit(request([5, 6, 7], max_tokens=12), NoText())
    while len(sequence.answer) < 3:
        machine.step()
    machine.pause(sequence)
    with machine.owner:
        waiting = threading.Thread(target=machine.unpause, args=(sequence,))
        waiting.start()
        waiting.join(0.1)
        machine.release(sequence)
    waiting.join()
    assert sequence.status is Status.FINISHED and machine.scheduler.idle


def test_commands_that_come_while_it_closes_are_refused(target: Decoder) -> None:
    going, thread = threading.Event(), EngineThread(engine(target), lambda: None)
    first = thread.call(lambda: going.wait(30))
    closing = threading.Thread(target=thread.close)
    closing.start()
    with pytest.raises(forerun.ForerunError, match="closed"):
        for _ in range(1000):
            thread.call(lambda: None)
    going.set()
    closing.join()
    assert first.result()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_answers_whoever_waits(target: Decoder) -> None:
    machine, going = engine(target), threading.Event()
    thread = EngineThread(machine, lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    submitted = thread.call(lambda: (machine.submit(request([5, 6, 7]), NoText()), going.wait(30)))
    others = [thread.call(lambda: None) for _ in range(3)]
    going.set()
    submitted.result()
    thread._thread.join(30)
    assert all(future.done() for future in others)
    with pytest.raises(forerun.ForerunError, match="closed"):
        thread.call(lambda: None)
    thread.close()
