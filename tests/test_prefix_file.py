"""The prefix cache between runs: what a file brings back has the bits that were computed, or is not used at all."""

from __future__ import annotations

import errno
import os
import random
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from device_engines import TOKENS, device_engine, tiny_folder
from engines import CHUNK, CPU, PAGE, VOCAB, decoder, engine, request, run
from heads import ODD, SHAPE, mtp_engine, prompts, train_head, write_head
from test_prefix_bits import FAMILIES, STRIDE, TEXT, said, wish
from tiny import tiny_model

from forerun.cache import prefix_file
from forerun.cache.device_recurrent import DeviceContents, DeviceStates
from forerun.cache.pages import PagePool
from forerun.cache.prefix_file import PrefixFacts, PrefixFile, choose
from forerun.draft.mtp import MtpDrafter
from forerun.engine.engine import Engine
from forerun.errors import ForerunError
from forerun.kernels.interface import AttentionSpec, DeltaLayout, HeadLayout
from forerun.models.layers.decoder import Decoder

FACTS = PrefixFacts({"model": "this"}, {"version": "1"})


def kept(path: Path, **more: Any) -> PrefixFile:
    return PrefixFile(path, FACTS, **more)


def again(model: Decoder, path: Path, **options: Any) -> Engine:
    """An engine of the next run."""
    machine = engine(model, **options)
    machine.pool.prefix.stride = STRIDE
    kept(path).read(machine.pool)
    return machine


def written(model: Decoder, path: Path, *prompts: list[int]) -> Engine:
    machine = again(model, path)
    for prompt in prompts:
        run(machine, wish(prompt))
    kept(path).write(machine.pool)
    machine.pool.check([])
    return machine


@pytest.fixture(scope="module", params=["llama", "some windows", "gemma", "gemma experts", "hybrid", "hybrid experts"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return decoder(FAMILIES[request.param](tmp_path_factory.mktemp("m")), quantize=True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return decoder(FAMILIES["llama"](tmp_path_factory.mktemp("m") / "llama"), quantize=True)


@pytest.mark.parametrize("draft", ["off", "lookup"])
def test_a_conversation_goes_on_in_every_run(model: Decoder, tmp_path: Path, draft: str) -> None:
    """A process for each turn: what is computed again is less than a page, or a stride of states."""
    path, cold, dice = tmp_path / "cache", engine(model, prefix_cache=False), random.Random(5)
    prompt, step, known = TEXT[:19], PAGE if model.config.delta is None else STRIDE, 0
    while len(prompt) < 160:
        warm, asked = again(model, path), wish(prompt, draft, tokens=dice.randint(1, 40))
        (mine,), (alone,) = run(warm, asked), run(cold, asked)
        assert said(mine) == said(alone), f"{mine.counters.cached} of {len(prompt)} tokens were cached"
        assert known - step < mine.counters.cached <= known
        kept(path).write(warm.pool)
        warm.pool.check([])
        known = len(mine.tokens) - 1
        prompt = [*mine.tokens, *(dice.randrange(4, VOCAB) for _ in range(dice.randint(1, 30)))]


def test_pages_that_have_to_go_come_back_from_the_file(model: Decoder, tmp_path: Path) -> None:
    path, cold = tmp_path / "cache", engine(model, prefix_cache=False)
    written(model, path, TEXT[:100])
    warm = again(model, path, pages=24)
    for number in range(3):
        for prompt in ([*TEXT[:100], number], [token ^ 1 for token in TEXT[:150]]):
            (mine,), (alone,) = run(warm, wish(prompt)), run(cold, wish(prompt))
            assert said(mine) == said(alone)
            assert prompt[0] != TEXT[0] or mine.counters.cached == 96
            warm.pool.check([])
    assert not warm.pool.prefix.host_bytes


def test_nothing_is_copied_before_its_text_comes(llama: Decoder, tmp_path: Path) -> None:
    written(llama, tmp_path / "cache", TEXT[:100], TEXT[3:50])
    warm = again(llama, tmp_path / "cache")
    index = warm.pool.prefix
    assert len(index) == 13 + 6 and not index.idle and warm.pool.groups[0].free == warm.pool.count
    run(warm, wish(TEXT[:41]))
    assert index.idle == 5 and not index.host_bytes


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Path, list[int]]:
    """A target, its head, and a text that it knows."""
    root = tmp_path_factory.mktemp("trained")
    folder = tiny_model(root / "target", "llama", **ODD)
    target = decoder(folder, quantize=False)
    known = [sequence.tokens for sequence in run(engine(target), *[request(text) for text in prompts(3)])]
    return target, write_head(root / "head", folder, SHAPE, train_head(target, known, SHAPE)), known[0]


def test_a_head_goes_on_from_its_entries_and_features(trained: tuple[Decoder, Path, list[int]], tmp_path: Path) -> None:
    """It drafts what it drafts when it has read the prompt itself."""
    target, head, text = trained
    for length in (len(text) - 3, len(text) - 7):
        path, asked = tmp_path / f"{length}", request(text[:length], max_tokens=20, draft="mtp", draft_tokens=3)
        before, warm = mtp_engine(target, head), mtp_engine(target, head)
        (first,) = run(before, asked)
        kept(path).write(before.pool)
        kept(path).read(warm.pool)
        (mine,) = run(warm, asked)
        assert mine.answer == first.answer and mine.counters.cached > 2 * PAGE
        assert mine.counters.accepted == first.counters.accepted > 0
        assert mine.counters.drafted == first.counters.drafted
        used = [page for page in warm.pool.prefix._pages.values() if page.stored is not None and page.resident]
        for page in used:
            features = before.pool.prefix._pages[page.key].edge
            assert page.edge is not None and features is not None and torch.equal(page.edge, features)
        assert len(used) == mine.counters.cached // PAGE


def test_pages_that_a_head_has_read_again_replace_those_of_the_file(trained: tuple[Decoder, Path, list[int]]) -> None:
    target, head, text = trained
    path, asked = head / "cache", request(text[:-3], max_tokens=20, draft="mtp", draft_tokens=3)
    (first,) = run(mtp_engine(target, head), asked)
    for once in (replace(asked, draft="off"), replace(asked, prompt_logprobs=True)):  # the second reads every row
        machine = mtp_engine(target, head)
        kept(path).read(machine.pool)
        run(machine, once)
        kept(path).write(machine.pool)
    warm = mtp_engine(target, head)
    kept(path).read(warm.pool)
    (mine,) = run(warm, asked)
    assert mine.answer == first.answer and mine.counters.cached > 2 * PAGE
    assert mine.counters.accepted == first.counters.accepted


def test_a_hybrid_drafts_with_its_own_head(tmp_path: Path) -> None:
    target = decoder(FAMILIES["hybrid"](tmp_path / "m"), quantize=True)
    head = target.native_head()
    assert head is not None
    before, warm, cold = (engine(target, beside=[MtpDrafter(head, VOCAB)], prefix_cache=kind) for kind in (1, 1, 0))
    before.pool.prefix.stride = warm.pool.prefix.stride = STRIDE
    asked = request(TEXT[:70], max_tokens=20, draft="mtp", draft_tokens=3, temperature=0.7, seed=2)
    run(before, asked)
    kept(tmp_path / "cache").write(before.pool)
    kept(tmp_path / "cache").read(warm.pool)
    (mine,), (alone,) = run(warm, asked), run(cold, asked)
    assert mine.answer == alone.answer and mine.counters.cached == 64
    assert mine.counters.drafted == alone.counters.drafted > 0


def test_rounds_of_a_device(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    before, warm, cold = (device_engine(folder, None, prefix_cache=kind) for kind in (True, True, False))
    asked = request(TEXT[:40], max_tokens=TOKENS, temperature=0.8, seed=4)
    run(before, asked)
    kept(tmp_path / "cache").write(before.pool)
    kept(tmp_path / "cache").read(warm.pool)
    (mine,), (alone,) = run(warm, asked), run(cold, asked)
    assert mine.answer == alone.answer and mine.counters.cached == 2 * CHUNK


@pytest.mark.parametrize("decoded", [False, True])
def test_states_of_a_device(tmp_path: Path, decoded: bool) -> None:
    """With rows to replay and without; number formats and shapes without elements come back too."""
    layout = DeltaLayout(key_heads=1, value_heads=2, key_size=8, value_size=4, window=3)
    pools = [
        PagePool(
            [AttentionSpec(HeadLayout(1, 1, 2))], 4, PAGE, torch.bfloat16, CPU, DeviceStates(layout, 2, 3, CPU), True
        )
        for _ in range(2)
    ]
    states = pools[0].states
    assert isinstance(states, DeviceStates)
    for pool in pools:
        pool.prefix.most_states = 1
    slot = states.take()
    for part in (states._state, states._inputs, states._record):
        part.normal_()
    if decoded:
        states.committed(slot)
    pools[0].groups[0].take(1)
    pools[0].groups[0]._keys.normal_()
    page = pools[0].prefix.add(b"n" * 16, None, tuple(range(PAGE)), b"m", [0])
    pools[0].prefix.use(page)
    page.edge = torch.randn(6).bfloat16()
    pools[0].prefix.keep_state(page, states.copy(slot, CPU))
    kept(tmp_path / "cache").write(pools[0])
    kept(tmp_path / "cache").read(pools[1])
    found = pools[1].prefix.get(page.key, None, page.tokens, page.media)
    assert found is not None
    pools[1].prefix.use(found)
    pools[1].prefix.bring_back([found])
    state, mine = pools[1].prefix.state_of(found), page.state
    assert isinstance(state, DeviceContents) and isinstance(mine, DeviceContents) and state.decoded == decoded
    for one, other in zip(sum(state.layers, (state.kept,)), sum(mine.layers, (mine.kept,)), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert found.edge is not None and torch.equal(found.edge, page.edge)
    keys = [pool.groups[0]._keys[:, 0] for pool in pools]
    assert torch.equal(keys[0], keys[1])


# ---- what is kept


def tokens_of(path: Path) -> set[int]:
    pages = prefix_file.read_pages(path, prefix_file.read_header(path), 1)
    return {token for page in pages for token in page.tokens}


def test_the_file_has_a_limit_and_what_was_found_stays(llama: Decoder, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    machine = written(llama, path, TEXT[:80])
    most = 20 * path.stat().st_size // 10
    system = [9] * 40
    for number in range(14):
        machine = again(llama, path)
        if number < 2:
            run(machine, wish([*system, *range(20 + 20 * number, 40 + 20 * number)], tokens=1))
        run(machine, wish([100 + number] * 30, tokens=1))
        kept(path, largest=most).write(machine.pool)
        assert path.stat().st_size < most + (64 << 10)
    tokens = tokens_of(path)
    assert 9 in tokens and {111, 112, 113} <= tokens and not tokens & {100, 101, 102, 20}
    for number in range(6):  # what is found in every run leaves room for what is new
        machine = again(llama, path)
        for other in range(5):
            run(machine, wish([200 + other] * 60, tokens=1))
        if number == 5:
            run(machine, wish([150] * 30, tokens=1))
        kept(path, largest=most).write(machine.pool)
    assert {150, 204} <= tokens_of(path) and path.stat().st_size < most + (64 << 10)


def test_every_page_is_kept_with_those_before_it(llama: Decoder, tmp_path: Path) -> None:
    machine = written(llama, tmp_path / "cache", TEXT[:100], [*TEXT[:60], *TEXT[:60]], TEXT[3:50])
    sizes = [prefix_file._page_bytes(machine.pool.prefix, page) for page in machine.pool.prefix.by_worth()]
    for largest in range(0, sum(sizes) + 1, sizes[0]):
        pages = choose(machine.pool.prefix, largest)
        assert len(pages) == min(len(sizes), largest // sizes[0])
        assert all(page.parent is None or page.parent in pages[:at] for at, page in enumerate(pages))


def test_a_file_of_ones_own(llama: Decoder, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    written(llama, path, TEXT[:50])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and os.listdir(tmp_path) == ["cache"]
    path.chmod(0o644)
    written(llama, path, TEXT[9:60])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert run(again(llama, path), wish(TEXT[:50]))[0].counters.cached == 48


# ---- what cannot be used


def test_damage_anywhere_is_seen(llama: Decoder, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A byte is changed, or the end is missing: the answers stay, and a line says so."""
    path, cold, dice = tmp_path / "cache", engine(llama, prefix_cache=False), random.Random(3)
    written(llama, path, TEXT[:100])
    whole = path.read_bytes()
    asked = [wish(TEXT[:100]), wish(TEXT[:40])]
    plain = [said(run(cold, one)[0]) for one in asked]
    seen = set()
    for number in range(150):
        at = dice.randrange(8 + len(prefix_file.BEGINNING), len(whole) if number % 2 else 3000)
        if number % 10 == 0:
            path.write_bytes(whole[:at])
        else:
            path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << dice.randrange(8))]) + whole[at + 1 :])
        caplog.clear()
        warm = again(llama, path)
        answers = [run(warm, one)[0] for one in asked]
        assert [said(one) for one in answers] == plain
        harmless = answers[0].counters.cached == 96  # in blanks, or in a page behind the prompt
        assert len(caplog.records) == 1 or (harmless and not caplog.records)
        seen.add(answers[0].counters.cached)
        warm.pool.check([])
        kept(path).write(warm.pool)
        assert harmless or run(again(llama, path), asked[0])[0].counters.cached == 96
    assert {0, 96} < seen


def test_damage_does_not_pass_into_the_next_file(llama: Decoder, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    written(llama, path, TEXT[:50])
    found = prefix_file.read_pages(path, prefix_file.read_header(path), 1)
    stored = found[3].stored
    assert stored is not None
    start = path.read_bytes().find(bytes(stored.mapped.bytes(stored.page)))
    with path.open("r+b") as stream:
        stream.seek(start)
        stream.write(b"\x7f")
    written(llama, path, [7] * 20)  # which does not look at it
    warm, cold = again(llama, path), engine(llama, prefix_cache=False)
    (mine,), (alone,) = run(warm, wish(TEXT[:50])), run(cold, wish(TEXT[:50]))
    assert said(mine) == said(alone) and mine.counters.cached == 3 * PAGE


def test_a_damaged_state_is_none(tmp_path: Path) -> None:
    hybrid = decoder(FAMILIES["hybrid"](tmp_path / "m"), quantize=True)
    path, cold = tmp_path / "cache", engine(hybrid, prefix_cache=False)
    written(hybrid, path, TEXT[:70])
    whole, groups = path.read_bytes(), len(again(hybrid, path).pool.groups)
    stored = [page.stored for page in prefix_file.read_pages(path, prefix_file.read_header(path), groups)]
    states = [one.mapped.bytes(one.recurrent).tobytes() for one in stored if one is not None and one.recurrent]
    assert states
    for state in states:
        at = whole.find(state) + 5
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        (mine,), (alone,) = run(again(hybrid, path), wish(TEXT[:70])), run(cold, wish(TEXT[:70]))
        assert said(mine) == said(alone)
    assert run(again(hybrid, path), wish(TEXT[:70]))[0].counters.cached < 64  # the last one was hurt


def test_a_file_of_something_else_is_refused_and_stays(llama: Decoder, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    machine = written(llama, path, TEXT[:50])
    whole = path.read_bytes()
    other = PrefixFile(path, PrefixFacts({"model": "that"}, FACTS.versions))
    with pytest.raises(ForerunError, match="another model: give another file"):
        other.read(engine(llama).pool)
    other.write(machine.pool)  # written by another process since
    assert path.read_bytes() == whole


def test_a_damaged_header_is_no_other_model(llama: Decoder, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "cache"
    written(llama, path, TEXT[:50])
    whole = path.read_bytes()
    assert whole.count(b"this") == 1
    path.write_bytes(whole.replace(b"this", b"that"))
    assert not len(again(llama, path).pool.prefix) and "is damaged" in caplog.text


def test_a_file_of_an_earlier_version_is_replaced(
    llama: Decoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cache"
    machine = written(llama, path, TEXT[:50])
    later = PrefixFile(path, PrefixFacts(FACTS.model, {"version": "2"}))
    pool = engine(llama).pool
    later.read(pool)
    assert not len(pool.prefix) and len(caplog.records) == 1 and "another version" in caplog.text
    later.write(machine.pool)
    later.read(pool)
    assert len(pool.prefix) == 6


@pytest.mark.parametrize("contents", [b"a letter", b"x" * 500, b"\x00" * 200])
def test_what_is_no_such_file_is_never_touched(llama: Decoder, tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "letter.txt"
    path.write_bytes(contents)
    machine = engine(llama)
    run(machine, wish(TEXT[:50]))
    with pytest.raises(ForerunError, match="name another one"):
        prefix_file.check_place(path)
    with pytest.raises(ForerunError, match="name another one"):
        kept(path).read(machine.pool)
    kept(path).write(machine.pool)
    assert path.read_bytes() == contents


def test_places_that_cannot_be(tmp_path: Path) -> None:
    for path, reason in ((tmp_path, "is a folder"), (tmp_path / "no" / "cache", "no folder"), (Path(os.devnull), "no")):
        with pytest.raises(ForerunError, match=reason):
            prefix_file.check_place(path)
    (tmp_path / "empty").touch()
    (tmp_path / "link").symlink_to("empty")
    assert prefix_file.check_place(tmp_path / "link") == (tmp_path / "empty").resolve()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_where_writing_fails_the_file_stays(
    llama: Decoder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
) -> None:
    path = tmp_path / "cache"
    written(llama, path, TEXT[:50])
    whole, machine = path.read_bytes(), again(llama, path)
    run(machine, wish(TEXT[:90]))

    def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(prefix_file.PageWriter, "state", fail)
        if isinstance(error, OSError):
            kept(path).write(machine.pool)
            assert "No space left" in caplog.text and len(caplog.records) == 1
        else:
            with pytest.raises(KeyboardInterrupt):
                kept(path).write(machine.pool)
    assert path.read_bytes() == whole and os.listdir(tmp_path) == ["cache"]


def test_the_file_may_be_replaced_while_another_run_has_it(llama: Decoder, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    written(llama, path, TEXT[:100])
    warm, cold = again(llama, path), engine(llama, prefix_cache=False)
    path.unlink()
    written(llama, path, TEXT[7:60])
    (mine,), (alone,) = run(warm, wish(TEXT[:100])), run(cold, wish(TEXT[:100]))
    assert said(mine) == said(alone) and mine.counters.cached == 96
    kept(path).write(warm.pool)
    assert run(again(llama, path), wish(TEXT[:100]))[0].counters.cached == 96
