"""Prompts to train on: many, all different, none from the evaluation; loops found; users' files read."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from tiny import tiny_tokenizer

from forerun.errors import ForerunError
from forerun.text.chat import encode_prompt
from forerun.train.card import figures
from forerun.train.encode import PromptEncoder
from forerun.train.evaluate import Measured, table
from forerun.train.loops import is_looping, loop_starts
from forerun.train.prompts import documents
from forerun.train.prompts.files import read_prompts
from forerun.train.prompts.mixture import SHARES, WRITERS, Corpus, built_in_prompts, next_turns
from forerun.train.prompts.overlap import Overlap
from forerun.train.prompts.phrases import Phrases
from forerun.train.prompts.prompt import text_of
from forerun.train.prompts.questions import EVERYDAY, WIDE, read_evaluation
from forerun.train.prompts.survey import kind_of, survey
from forerun.train.settings import Settings


def test_evaluation_has_twelve_prompts_of_each_kind_all_different() -> None:
    questions = [question for question in read_evaluation(None) if question.collection == EVERYDAY]
    kinds = Counter(question.category for question in questions)
    assert set(kinds) == {"chat", "code", "summary", "translation", "reasoning", "extraction", "questions"}
    assert min(kinds.values()) >= 12 and len({text_of(question.prompt) for question in questions}) == len(questions)


def test_the_wide_evaluation_has_120_prompts_a_third_of_them_long() -> None:
    questions = [question for question in read_evaluation(None) if question.collection == WIDE]
    words = {True: [], False: []}  # type: dict[bool, list[int]]
    for question in questions:
        words[question.long].append(len(text_of(question.prompt).split()))
    assert len(words[False]) == 80 and len(words[True]) == 40
    assert max(words[False]) < 120 and min(words[True]) > 170 and max(words[True]) < 1300
    assert len({text_of(question.prompt) for question in questions}) == 120
    assert sum(isinstance(question.prompt, list) for question in questions) >= 4
    assert len({question.category for question in questions}) >= 10


def test_built_in_prompts_are_many_repeatable_and_not_in_the_evaluation() -> None:
    manual = documents.manual_paragraphs()
    docstrings, functions = documents.docstrings_and_functions(["textwrap", "json"])
    assert len(manual) > 50 and len(docstrings) > 5 and len(functions) > 3
    corpus = Corpus(manual, docstrings, functions, [])
    prompts = list(itertools.islice(built_in_prompts(0, corpus), 1000))
    texts = [text_of(prompt) for prompt in prompts]
    assert len(set(texts)) > 900
    assert not any(blank in text for text in texts for blank in ("{topic}", "{passage}", "{name}"))
    assert prompts[:50] == list(itertools.islice(built_in_prompts(0, corpus), 50))
    assert prompts[:50] != list(itertools.islice(built_in_prompts(1, corpus), 50))
    overlap = Overlap(text_of(question.prompt) for question in read_evaluation(None))
    assert not any(overlap.found_in(text) for text in texts)


def test_the_mixture_has_long_inputs_and_plain_questions() -> None:
    corpus = Corpus(documents.manual_paragraphs(), [], [], [])
    texts = [text_of(prompt) for prompt in itertools.islice(built_in_prompts(0, corpus), 2000)]
    assert 0.03 < sum(len(text) > 1200 for text in texts) / 2000 < 0.2
    assert max(map(len, texts)) > 4000
    assert 0.2 < sum(len(text) < 60 for text in texts) / 2000 < 0.7
    answers = ["The river rises in the hills and runs to the sea. " * (8 * (n % 4)) or "Yes." for n in range(2000)]
    later = list(next_turns(zip(texts, answers, strict=True), seed=0))
    assert sum(isinstance(prompt, str) and "[2] The river" in prompt for prompt in later) > 100
    assert later == list(next_turns(zip(texts, answers, strict=True), seed=0))


def test_overlap_finds_equal_and_nearly_equal_prompts() -> None:
    known = "Please write down the names of all the rivers that cross Europe."
    overlap = Overlap([known, "Why?"])
    assert overlap.found_in(known.upper()) and overlap.found_in("why")
    assert overlap.found_in("hey! write down the names of all the rivers now")
    assert not overlap.found_in("write down the names of seven rivers that cross Europe")


def test_next_turns_go_on_from_an_answer() -> None:
    long = "The river rises in the hills and runs to the sea. " * 8
    turns = list(next_turns([("Tell me about rivers.", long), ("Hi", "Hello!")] * 40, seed=0))
    assert len(turns) == 80
    assert any(isinstance(turn, str) and "The river rises" in turn for turn in turns)
    assert any(isinstance(turn, list) and turn[1] == {"role": "assistant", "content": "Hello!"} for turn in turns)


def test_loops_are_found_and_cut_after_their_second_round() -> None:
    loop = [1, 2, 3] + [7, 8, 9, 10, 11] * 6
    straight = list(range(33))
    short = [1, 2, 3] + [5] * 6 + list(range(40, 64))  # a short run is no loop
    tokens = torch.tensor([loop, straight, short])
    assert loop_starts(tokens, torch.tensor([33, 33, 33])).tolist() == [3 + 10, 33, 33]
    assert loop_starts(tokens, torch.tensor([12, 33, 33])).tolist() == [12, 33, 33]
    assert is_looping(tokens).tolist() == [True, False, False]


def test_encoder_agrees_with_generate() -> None:
    encoder = PromptEncoder(tiny_tokenizer(), 300)
    prompts = ["Hello there", "  spaces \n\n kept ", [{"role": "user", "content": "one"}]]
    found = encoder.encode_all([*prompts, "end <|im_end|> it"])
    assert found == [*(encode_prompt(encoder.tokenizer, prompt) for prompt in prompts), None]
    turn = encoder.user_turn()
    assert turn is not None and encoder.tokenizer.decode(turn) == "<|im_start|>user\n"


def test_prompts_are_read_from_lines_blocks_json_and_folders(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.txt").write_text("first\nblock\n\nsecond\n")
    messages = {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "four"}]}
    (tmp_path / "c.jsonl").write_text(json.dumps({"prompt": "three"}) + "\n" + json.dumps(messages) + "\n")
    assert read_prompts([tmp_path / "a.txt"]) == ["one", "two"]
    read = ["one", "two", "first\nblock", "second", "three", messages["messages"]]
    assert read_prompts([tmp_path]) == read
    assert read_prompts([tmp_path, tmp_path / "a.txt"]) == [*read, "one", "two"]


def test_instruction_sets_are_read_in_their_own_forms(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "An answer."}
    asked = [{"role": "user", "content": "First?"}, said, {"role": "user", "content": "And then?"}]
    shared = [{"from": "human", "value": "First?"}, {"from": "gpt", "value": "An answer."}]
    entries: list[dict[str, object]] = [
        {"instruction": "Sort these.", "input": "b, a", "output": "a, b"},
        {"instruction": "Say hello.", "input": ""},
        {"question": "Who?", "context": "A text."},
        {"text": "Line\u2028separated."},
        {"messages": [*asked, said]},
        {"conversations": shared},
        {"conversations": [*shared, {"from": "human", "value": "And then?"}]},
        {"instruction": "Who wrote it?", "context": "A text.", "response": "Nobody."},  # Dolly
        {"conversation": [*asked, said]},  # LMSYS, WildChat
        {"prompt": asked, "chosen": [said]},  # preference data
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "now?"}]}
            ]
        },
    ]
    file = tmp_path / "sets.jsonl"
    file.write_text("\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries), encoding="utf-8")
    texts = ["Sort these.\n\nb, a", "Say hello.", "A text.\n\nWho?", "Line\u2028separated."]
    more = ["Who wrote it?\n\nA text.", asked, asked, "What now?"]
    assert read_prompts([file]) == [*texts, asked, "First?", asked, *more]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"prompt": 1}', "not text"),
        ('{"prompt": " "}', "empty"),
        ("nonsense", "not valid JSON"),
        ("[]", "not an object"),
        ('{"answer": "x"}', "no field"),
        ('{"messages": [{"role": "parrot", "content": "x"}]}', "parrot"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "says nothing"),
        ('{"conversations": [{"from": "human"}]}', "without text"),
        ('{"messages": "x"}', "list of objects"),
        ('{"messages": [{"role": "user", "content": [{"type": "image", "path": "x"}]}]}', "without text"),
        ("[" * 200_000, "not valid JSON"),
        (r'{"prompt": "half \ud83d of it"}', "half of a character"),
        (r'{"messages": [{"role": "user", "content": "\udc00"}]}', "half of a character"),
    ],
)
def test_bad_prompt_files_are_refused_with_file_and_line(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "good"}\n\n' + text)
    with pytest.raises(ForerunError, match=r"bad\.jsonl, line 3: ") as error:
        read_prompts([file])
    assert told in str(error.value) and "\n" not in str(error.value)


def test_lists_in_json_files_are_no_lines_of_text(tmp_path: Path) -> None:
    """Instruction sets come as one list too: brackets and field names are nothing to train on."""
    file = tmp_path / "set.json"
    file.write_text(json.dumps([{"instruction": "Sort.", "input": "b, a"}, {"prompt": "Go on."}], indent=1))
    assert read_prompts([file]) == ["Sort.\n\nb, a", "Go on."]
    file.write_text('[{"prompt": "good"}, {"answer": "x"}]')
    with pytest.raises(ForerunError, match=r"set\.json, entry 2: has no field"):
        read_prompts([file])
    for name in ("lines.json", "LINES.JSONL", "lines.ndjson"):
        (tmp_path / name).write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
        assert read_prompts([tmp_path / name]) == ["a", "b"]


def test_a_mark_before_the_first_character_is_no_part_of_a_prompt(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", '{"prompt": "one"}'), ("a.txt", "one")):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert read_prompts([tmp_path / name]) == ["one"]
    assert [question.prompt for question in read_evaluation(tmp_path / "a.jsonl")] == ["one"]


def test_what_cannot_be_read_is_one_line_that_says_why(tmp_path: Path) -> None:
    (tmp_path / "named.txt").mkdir()  # a folder, whatever its name
    (tmp_path / "a.txt").write_text("one")
    assert read_prompts([tmp_path]) == ["one"]
    (tmp_path / "a.txt").write_bytes("größer".encode("latin-1"))
    with pytest.raises(ForerunError, match="not UTF-8"):
        read_prompts([tmp_path])
    with pytest.raises(ForerunError, match="No such file"):
        read_evaluation(tmp_path / "none.jsonl")


def test_a_survey_tells_kinds_lengths_and_what_is_missing() -> None:
    prompts = [
        "Translate to German: hello",
        "Write a poem.",
        "Who was Bach?",
        "Explain this code: x = 1",
        "Summarize: y",
    ]
    assert [kind_of(prompt) for prompt in prompts] == ["translation", "writing", "question", "code", "summary"]
    assert kind_of([{"role": "user", "content": "Hi!"}, {"role": "user", "content": "Why?"}]) == "question"
    found = survey(prompts * 10, [5, 20, 30, 40, 400] * 10, 350, repeated=3, evaluated=2)
    told = "\n".join(found)
    assert "50 prompts: translation 20%" in told and "the longest 400; 10 over 300" in told
    assert "3 that repeat another one, 2 that share" in told and "10 that are too long" in told
    assert "hardly any maths, inputs over 300 tokens:" in told  # those that are too long are not learned from
    assert "4 that the chat template does not take" in survey(prompts, [5] * 5, 350, 0, 0, refused=4)[2]
    instructed = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    talk = [*instructed[1:], {"role": "assistant", "content": "So."}, {"role": "user", "content": "And?"}]
    assert "; 1 with several turns" in survey([instructed, talk], [9, 9], 350, 0, 0)[0]  # a system message is no turn
    assert survey([], [], 350, repeated=0, evaluated=4)[0].startswith("0 prompts")


@pytest.mark.parametrize("kind", sorted(WRITERS))
def test_every_kind_of_prompt_has_thousands_of_forms_and_no_blanks(kind: str) -> None:
    chance = random.Random(4)
    texts = [WRITERS[kind](chance) for _ in range(3000)]
    assert len(set(texts)) > 2500
    assert not any("{" in text or "}" in text for text in texts)
    overlap = Overlap(text_of(question.prompt) for question in read_evaluation(None))
    assert not any(overlap.found_in(text) for text in texts)


def test_the_mixture_adds_up_and_half_of_the_answers_are_greedy_by_default() -> None:
    assert sum(SHARES.values()) == pytest.approx(1)
    assert Settings().greedy_share == 0.5


def test_blanks_are_filled_by_rules() -> None:
    rules = {
        "pet": ["cat", "dog"],
        "gender": ["he|him", "she|her"],
        "owner": {"never": 0, "{gender.0} and the {pet}": 1},
        "small": "2..3",
        "sum": "10*small+1..small",
    }
    for seed in range(40):
        words = Phrases(rules, random.Random(seed), passage="{pet} stays as it is")
        assert words.fill("{passage}") == "{pet} stays as it is"
        pet, other, again, capital = words.fill("{pet} {pet2} {pet} {Pet}").split()
        assert {pet, other} == {"cat", "dog"} and pet == again and capital == pet.title()
        first, second = words.fill("{owner}|{owner2}").split("|")
        assert first.endswith(pet) and second.endswith(other)  # {owner2} is about {pet2}
        assert words.fill("{gender.0} {gender.1}") in ("he him", "she her")
        small, total = map(int, words.fill("{small} {sum}").split())
        assert small in (2, 3) and 10 * small < total <= 11 * small


def test_prompts_without_a_category_are_not_taken_for_all_of_them(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two", "category": "x"}\n')
    questions = read_evaluation(tmp_path / "mine.jsonl")
    answers = [Measured(question.category, False, {9: [1, 1, 1]}, 4) for question in questions]
    tables = {"greedy": table(answers, 9), "sampled": table(answers, 9)}
    told = figures({"evaluation": {"given": tables}})
    assert [line.split(" | ")[:2] for line in told if line.startswith("| all")] == [
        ["| all", "2"],
        ["| all, loops left out", "2"],
    ] * 2
    assert not any(line.startswith("| loops") for line in told)  # there is none
