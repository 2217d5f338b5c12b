"""Who gives way when pages run out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import PAGE, NoText, decoder, engine, finish, request, run
from tiny import tiny_model

import forerun
from forerun.engine.engine import Engine
from forerun.engine.sequence import Sequence, Status
from forerun.engine.warmup import warm_up
from forerun.errors import ForerunError
from forerun.progress import NullProgress


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


def serve(machine: Engine, sequences: list[Sequence], steps: int = 5000) -> None:
    """Run until all are done; each is released when it has ended, as a server does. A hang fails."""
    for _ in range(steps):
        machine.step()
        for sequence in sequences:
            if sequence.status is Status.FINISHED:
                machine.release(sequence)
        if all(sequence.given_up for sequence in sequences):
            return
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("most", [None, 200])
def test_forty_answers_begin_together_and_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int | None
) -> None:
    """A maximum is a limit and no reservation: none waits for pages that others may never need."""
    monkeypatch.setattr("forerun.engine.scheduler.DEFAULT_ANSWER", 6)
    model = decoder(tiny_model(tmp_path, "llama", num_hidden_layers=1), quantize=False)
    # At random: so that answers end at different lengths, most of them before the context does.
    wishes = [
        request([7 + n] * 5, max_tokens=most, temperature=1.0, seed=n, stop_ids=frozenset({9})) for n in range(40)
    ]
    machine = engine(model, pages=160)
    sequences = [machine.submit(wish, NoText()) for wish in wishes]
    machine.step()
    assert not machine.scheduler.waiting, "all have begun"
    serve(machine, sequences)
    alone = [run(engine(model), wish)[0] for wish in wishes]
    assert [s.answer for s in sequences] == [s.answer for s in alone]
    assert [s.finish_reason for s in sequences] == [s.finish_reason for s in alone]
    assert {s.finish_reason for s in sequences} == {"stop", "length"} and machine.scheduler.preemptions > 0
    machine.pool.check([])


def test_an_answer_may_fill_the_whole_cache(tmp_path: Path) -> None:
    """The context is larger: its end comes when the last page is full, and others had their turn meanwhile."""
    model = decoder(tiny_model(tmp_path, "llama", num_hidden_layers=1), quantize=False)
    machine, whole = engine(model, pages=12), 12 * PAGE
    for most in (None, 1000):
        large = machine.submit(request([5, 6, 7], max_tokens=most), NoText())
        others = [machine.submit(request([40 + n, 41], max_tokens=most), NoText()) for n in range(3)]
        serve(machine, [large, *others])
        assert [s.finish_reason for s in (large, *others)] == ["length"] * 4
        assert [len(s.tokens) for s in (large, *others)] == [whole + 1] * 4, "the last token needs no place"
    assert machine.longest == whole
    assert run(machine, request([5] * (whole - 1), max_tokens=None))[0].finish_reason == "length"
    with pytest.raises(ForerunError, match=f"the prompt has {whole} tokens and the cache holds {whole}: .*--memory"):
        machine.submit(request([5] * whole, max_tokens=1), NoText())


@pytest.mark.parametrize(("pages", "more"), [(100, 5), (19, 1)])
def test_pages_come_in_strides_while_all_could_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: int, more: int
) -> None:
    """A device must not stop for a page of its own in every round; where pages are few they come one by one."""
    monkeypatch.setattr("forerun.engine.scheduler.DEFAULT_ANSWER", 4 * PAGE)
    model = decoder(tiny_model(tmp_path, "llama", num_hidden_layers=1), quantize=False)
    machine = engine(model, pages=pages)
    sequences = [machine.submit(request([5 + n, 6, 7], max_tokens=None), NoText()) for n in range(2)]
    machine.step()
    held = len(sequences[0].cache.pages)
    for _ in range(100):
        machine.step()
        if len(sequences[0].cache.pages) > held:
            break
    assert len(sequences[0].cache.pages) == held + more


def test_who_reads_a_prompt_gives_way_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that grows is not cut short while others that are not running hold pages."""
    monkeypatch.setattr("forerun.engine.scheduler.Scheduler.reservation", lambda _, wanted: len(wanted.prompt) + 1)
    model = decoder(tiny_model(tmp_path, "llama", num_hidden_layers=1), quantize=False)
    machine, prompt = engine(model, pages=7), [(7 * n) % 200 + 5 for n in range(24)]
    first = machine.submit(request(prompt[:4], max_tokens=44), NoText())
    while len(first.answer) < 2:
        machine.step()
    second = machine.submit(request(prompt, max_tokens=4), NoText())
    machine.step()
    assert second.status is Status.PREFILL
    monkeypatch.setattr(machine, "_prompts", lambda _: [])  # it does not come to its end
    while first.status is not Status.FINISHED:
        machine.step()
    assert len(first.answer) == 44 and second.status is Status.PARKED


def test_more_than_run_at_once_wait_for_a_place(tmp_path: Path) -> None:
    """Paused and ended sequences come back beyond the most that a round takes; nobody is lost."""
    model = decoder(tiny_model(tmp_path, "llama", num_hidden_layers=1), quantize=False)
    machine = engine(model, max_sequences=2)
    wishes = [request([5 + n, 6, 7], max_tokens=6) for n in range(5)]
    alone = [run(engine(model), wish)[0].answer for wish in wishes]
    sequences = []
    for wish in wishes:
        sequences.append(machine.submit(wish, NoText()))
        while len(sequences[-1].answer) < 2:
            machine.step()
        if len(sequences) % 2:
            machine.pause(sequences[-1])
        else:
            machine.cancel(sequences[-1])
    for sequence in sequences:
        if sequence.status is Status.PAUSED:
            machine.unpause(sequence)
        else:
            machine.resume(sequence)
    while any(sequence.status is not Status.FINISHED for sequence in sequences):
        assert len(machine.scheduler.running()) <= 2
        machine.step()
    assert [sequence.answer for sequence in sequences] == alone


def test_ended_sequences_are_given_up_where_host_memory_is_full(tmp_path: Path) -> None:
    """One that may be continued keeps its pages, or a copy of them, but not without end."""
    model = decoder(tiny_model(tmp_path, "llama", num_hidden_layers=1), quantize=False)
    machine = engine(model, pages=8)
    machine.scheduler.parked_limit = 1
    ended = [machine.submit(request([5 + n] * 9, max_tokens=4), NoText()) for n in range(5)]
    finish(machine, ended)
    assert [s.given_up for s in ended].count(True) >= 1 and any(s.cache.parked is not None for s in ended)
    with pytest.raises(ForerunError, match="its memory went to others"):
        machine.resume(next(s for s in ended if s.given_up), 4)
    kept = next(s for s in ended if s.cache.parked is not None)
    machine.resume(kept, 4)
    finish(machine, [kept])
    assert kept.answer == run(engine(model), request(kept.request.prompt, max_tokens=8))[0].answer
    for sequence in ended:
        machine.release(sequence)
    machine.pool.check([])


def test_a_sequence_that_held_all_pages_comes_back(tmp_path: Path) -> None:
    """Moved to host memory for another, it needs no more than there are; nobody waits for ever behind it."""
    model = decoder(tiny_model(tmp_path, "llama", num_hidden_layers=1), quantize=False)
    machine = engine(model, pages=12)
    large = machine.submit(request([5, 6, 7, 8, 9], max_tokens=None), NoText())
    while len(large.answer) < 3:
        machine.step()
    machine.pause(large)
    run_beside = machine.submit(request([40, 41, 42], max_tokens=4), NoText())
    finish(machine, [run_beside])
    machine.release(run_beside)
    assert large.cache.parked is not None
    machine.unpause(large)
    behind = machine.submit(request([40, 41, 42], max_tokens=4), NoText())
    while len(large.answer) < 6:
        machine.step()
    machine.cancel(large)
    finish(machine, [behind])


def test_a_released_sequence_cannot_be_continued(tmp_path: Path) -> None:
    machine = engine(decoder(tiny_model(tmp_path, "llama", num_hidden_layers=1), quantize=False))
    (gone,) = run(machine, request([5, 6, 7], max_tokens=4))
    with pytest.raises(ForerunError, match="closed"):
        machine.resume(gone, 4)


def test_a_prompt_that_is_being_read_can_be_paused(tmp_path: Path) -> None:
    model = decoder(tiny_model(tmp_path, "llama", num_hidden_layers=1), quantize=False)
    machine = engine(model, prefix_cache=False)
    wish = request([(7 * n) % 200 + 5 for n in range(40)], max_tokens=4)
    (plain,) = run(machine, wish)
    paused = machine.submit(wish, NoText())
    machine.step()
    machine.pause(paused)
    read = paused.cache.length
    for _ in range(4):
        machine.step()
    assert paused.cache.length == read < 40
    machine.unpause(paused)
    finish(machine, [paused])
    assert paused.answer == plain.answer


def test_who_comes_back_does_not_overtake(tmp_path: Path) -> None:
    """Others that are paused and unpaused between two rounds never take the place that an older one waits for."""
    model = decoder(tiny_model(tmp_path, "llama", num_hidden_layers=1), quantize=False)
    machine = engine(model, max_sequences=1)
    sequences = [machine.submit(request([5 + n, 6, 7], max_tokens=30), NoText()) for n in range(3)]
    for sequence in sequences:
        while not sequence.answer:
            machine.step()
        machine.pause(sequence)
    oldest, one, other = sequences
    machine.unpause(one)
    machine.unpause(oldest)
    before = len(oldest.answer)
    for _ in range(4):
        machine.pause(one)
        machine.unpause(other)
        machine.step()
        one, other = other, one
    assert len(oldest.answer) > before


def test_nothing_is_warmed_up_behind_one_that_cannot_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are with one that is paused, and host memory is full: whoever is submitted now has to wait."""
    model = decoder(tiny_model(tmp_path, "llama", num_hidden_layers=1), quantize=False)
    machine = engine(model, pages=8)
    machine.scheduler.parked_limit = 0
    holder = machine.submit(request([5] * 9, max_tokens=20), NoText())
    while not holder.answer:
        machine.step()
    machine.pause(holder)
    behind = machine.submit(request([6] * 9, max_tokens=20), NoText())
    machine.step()
    assert behind.status is Status.WAITING and machine.scheduler.idle
    with monkeypatch.context() as patched:
        patched.setattr(machine, "step", lambda: pytest.fail("it would wait for ever"))
        warm_up(machine, False, NullProgress())
    machine.unpause(holder)
    finish(machine, [holder, behind])


def test_an_answer_that_can_never_begin_says_so(tmp_path: Path) -> None:
    """Its reader is the only one who could let others go on: to wait would be to wait for ever."""
    model = forerun.load(str(tiny_model(tmp_path, "llama", num_hidden_layers=1)), device="cpu", max_context=40)
    model.engine.scheduler.parked_limit = 0
    paused = []
    while model.engine.scheduler.idle:
        paused.append(forerun.stream(model, [5, 6, 7], max_tokens=30, draft="off"))
        try:
            next(paused[-1])
        except ForerunError as error:
            assert "paused" in str(error)
            break
        paused[-1].pause()
        assert len(paused) < 500
    waiting = paused.pop()
    paused.pop().close()
    assert len([chunk for chunk in waiting if chunk.token is not None]) == 30


def test_one_that_waits_can_be_paused(tmp_path: Path) -> None:
    """It does not begin until it is wanted again, and nobody waits behind it meanwhile."""
    machine = engine(decoder(tiny_model(tmp_path, "llama", num_hidden_layers=1), quantize=False))
    machine.scheduler.max_sequences = 1
    (plain,) = run(machine, request([5, 6, 7], max_tokens=6))
    first, paused, behind = (machine.submit(request([5, 6, 7], max_tokens=6), NoText()) for _ in range(3))
    machine.step()
    machine.pause(paused)
    finish(machine, [first, behind])
    assert paused.status is Status.PAUSED and not paused.answer and machine.scheduler.idle
    machine.cancel(paused)
    machine.resume(paused)
    machine.pause(paused)
    machine.unpause(paused)
    finish(machine, [paused])
    assert [s.answer for s in (first, paused, behind)] == [plain.answer] * 3
    for sequence in (first, paused, behind):
        machine.release(sequence)
    machine.pool.check([])


def test_a_round_that_nobody_runs_in_decides_nothing(tmp_path: Path) -> None:
    """A device plans ahead for sequences that may all have ended, or given way, when the round is due."""
    machine = engine(decoder(tiny_model(tmp_path, "llama", num_hidden_layers=1), quantize=False))
    run(machine, request([5, 6, 7], max_tokens=6))
    assert machine._decide([], texts=True) == []
    assert not machine._plan().turns


def test_one_that_began_when_a_second_interrupt_came_does_not_begin_again(tmp_path: Path) -> None:
    """It is still in the queue then."""
    machine = engine(decoder(tiny_model(tmp_path, "llama", num_hidden_layers=1), quantize=False))
    (plain,) = run(machine, request([5, 6, 7], max_tokens=6))
    sequence = machine.submit(request([5, 6, 7], max_tokens=6), NoText())
    for _ in range(3):
        machine.step()
    machine.scheduler.waiting.append(sequence)
    machine.step()
    assert not machine.scheduler.waiting
    finish(machine, [sequence], steps=20)
    assert sequence.answer == plain.answer
