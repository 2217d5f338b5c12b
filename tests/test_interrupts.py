"""Ctrl-C at any moment: it ends a step, never a token."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest
from engines import Impatient, NoText, decoder, engine, request
from tiny import tiny_model

from forerun.engine.interrupts import interrupts_held
from forerun.engine.sequence import Status
from forerun.models.layers.decoder import Decoder

PROMPT = [5, 6, 7, 8] * 5


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


def test_blocks_inside_blocks_wait_for_the_outermost() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]


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
