"""Ctrl-C at any moment: it ends a step, never a token."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from engines import Impatient, NoText, decoder, engine, finish, request, run
from tiny import tiny_model

import forerun
from forerun.engine.interrupts import interrupts_held, interrupts_let_through
from forerun.engine.ownership import Ownership
from forerun.engine.plan import Plan
from forerun.engine.sequence import Status
from forerun.engine.warmup import warm_up
from forerun.language_model import Generation, LanguageModel
from forerun.models.layers.decoder import Decoder
from forerun.progress import NullProgress

PROMPT = [5, 6, 7, 8] * 5
OWNERSHIP = (Ownership.__enter__.__code__, Ownership.__exit__.__code__)


@pytest.fixture(autouse=True)
def usual_handler() -> Iterator[None]:
    """Whatever runs the tests may have its own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Decoder]:
    folders = [tiny_model(tmp_path_factory.mktemp("m"), "llama", seed=seed) for seed in (0, 1)]
    return decoder(folders[0], quantize=False), decoder(folders[1], quantize=False)


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        signal.raise_signal(signal.SIGINT)
        done = True
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_one_does_not_wait() -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done = True
    assert not done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_errors_do_not_hide_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as found, interrupts_held():
        signal.raise_signal(signal.SIGINT)
        raise ValueError
    assert isinstance(found.value.__cause__, ValueError)
    with pytest.raises(ValueError, match="mine"), interrupts_held():
        raise ValueError("mine")


def test_an_interrupt_while_a_block_is_left_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when the block has failed already, just before the usual handler is back."""
    usual, pressed = signal.signal, []

    def press(number: int, handler: Any) -> Any:
        if handler is signal.default_int_handler and not pressed:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)
        return usual(number, handler)

    with pytest.raises(KeyboardInterrupt), interrupts_held():
        monkeypatch.setattr(signal, "signal", press)
        raise ValueError
    assert pressed


def test_a_block_that_an_interrupt_keeps_from_being_left_changes_nothing_later() -> None:
    """Its handler came back when the block was collected, and took the next Ctrl-C for itself."""
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        block = interrupts_let_through()
        block.__enter__()
        signal.raise_signal(signal.SIGINT)  # before the first line inside
    del block
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_usual_handler_is_back_when_the_second_one_comes() -> None:
    """It may come while the block is being left."""
    usual = False
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert usual


def test_blocks_inside_blocks_wait_for_the_outermost() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]


def test_work_that_takes_long_is_interrupted_at_once() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_held(), interrupts_let_through():
        signal.raise_signal(signal.SIGINT)
        done.append("the rest of it")
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        signal.raise_signal(signal.SIGINT)
        with interrupts_let_through():
            done.append("begun in spite of it")
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        with interrupts_let_through():
            pass
        signal.raise_signal(signal.SIGINT)
        done.append("what comes after it")
    assert done == ["what comes after it"]


def test_handlers_of_others_and_other_threads_are_left_alone() -> None:
    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append("theirs"))
    with interrupts_held():
        signal.raise_signal(signal.SIGINT)
    assert seen == ["theirs"]

    def elsewhere() -> None:
        with interrupts_held():
            seen.append("thread")

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == ["theirs", "thread"]


@pytest.mark.parametrize("arm", ["off", "lookup", "model", "auto"])
def test_answers_survive_an_interrupt_in_every_round(models: tuple[Decoder, Decoder], arm: str) -> None:
    machine = engine(models[0], draft_model=models[1])
    wish = request(PROMPT, draft=arm, temperature=0.8, seed=4, max_tokens=30)
    calm = machine.submit(wish, NoText())
    while calm.status is not Status.FINISHED:
        machine.step()
    machine.release(calm)
    sink, interrupted = Impatient(), 0
    sequence = machine.submit(wish, sink)
    for _ in range(100):
        if sequence.status is Status.FINISHED:
            break
        try:
            machine.step()
        except KeyboardInterrupt:
            interrupted += 1
            sink.pressed = False
    assert sequence.tokens == calm.tokens and [e.token for e in sequence.emissions] == calm.answer
    assert interrupted == 1 + sequence.counters.rounds  # the first token comes with the prompt
    machine.release(sequence)
    machine.pool.check([])


def test_interrupted_measurements_leave_nothing_behind(
    models: tuple[Decoder, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = engine(models[0], draft_model=models[1])

    def impatient() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(machine, "_plan", impatient)
    with pytest.raises(KeyboardInterrupt):
        warm_up(machine, False, NullProgress())
    assert not machine.scheduler.active
    machine.pool.check([])


def test_a_prompt_that_was_left_half_read_is_read_to_its_end(models: tuple[Decoder, Decoder]) -> None:
    """Cancelled in the middle of it, moved to host memory, taken up again."""
    prompt = [(7 * n) % 200 + 5 for n in range(60)]
    machine = engine(models[0], pages=16, prefix_cache=False)
    wish = request(prompt, max_tokens=6)
    plain = run(machine, wish)[0].answer
    sequence = machine.submit(wish, NoText())
    machine.step()
    assert 0 < sequence.cache.length < len(prompt)
    machine.cancel(sequence)
    other = machine.submit(request(prompt[:40], max_tokens=40), NoText())
    machine.step()
    assert sequence.cache.parked is not None
    machine.release(other)
    machine.resume(sequence)
    finish(machine, [sequence])
    assert sequence.answer == plain


def test_the_answer_has_all_the_round_gave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = forerun.load(str(tiny_model(tmp_path, "llama")), dtype="float32")
    plain = forerun.generate(model, PROMPT, max_tokens=30, draft="off", raw=True)
    with forerun.stream(model, PROMPT, max_tokens=30, draft="off", raw=True) as answer:
        shown = [next(answer).text for _ in range(2)]
        whole = model.engine._plan

        def impatient() -> Plan:
            signal.raise_signal(signal.SIGINT)
            return whole()

        monkeypatch.setattr(model.engine, "_plan", impatient)
        with pytest.raises(KeyboardInterrupt):
            next(answer)
        response = answer.response()
        assert response.completion_tokens == 3 == len(response.tokens)
        shown += [chunk.text for chunk in answer.ready_chunks()]
        assert len(shown) == 3 and "".join(shown) == response.text == answer.response().text
        monkeypatch.setattr(model.engine, "_plan", whole)
        assert "".join([*shown, *(chunk.text for chunk in answer)]) == plain.text


def interrupted_anywhere(model: LanguageModel, watched: tuple[CodeType, ...], run: Callable[[], object]) -> int:
    """Run it again and again, interrupted one instruction of `watched`, or of ownership for them, later each time.

    Nobody owns the engine afterwards, so that commands are obeyed: what was left to be released has been.
    """
    interrupted, place = 0, 0
    while interrupted == place:
        place += 1
        left = place

        def press(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal left
            caller = frame.f_back.f_code if frame.f_back is not None else None
            if frame.f_code not in watched and not (frame.f_code in OWNERSHIP and caller in watched):
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                left -= 1
                if left == 0:
                    signal.raise_signal(signal.SIGINT)
            return press

        try:
            sys.settrace(press)
            run()
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        obeyed: list[int] = []
        model.engine.owner.post(partial(obeyed.append, place))
        with model.engine.owner:
            assert obeyed, f"interrupted at instruction {place}, somebody still owns the engine"
    return interrupted


def test_an_interrupt_around_a_round_leaves_the_engine_free(tmp_path: Path) -> None:
    model = forerun.load(str(tiny_model(tmp_path, "llama")), max_context=500)
    generation = model.start("hello", max_tokens=480, draft="off", raw=True)
    step, advance = Generation._step, Generation._advance
    assert interrupted_anywhere(model, (step.__code__, advance.__code__), lambda: next(generation)) > 50


def test_an_interrupt_around_measurements_leaves_the_engine_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = forerun.load(str(tiny_model(tmp_path, "llama")), max_context=200)
    monkeypatch.setattr("forerun.engine.warmup.run_every_drafter", lambda _: None)
    assert interrupted_anywhere(model, (warm_up.__code__,), lambda: warm_up(model.engine, False, NullProgress())) > 50
