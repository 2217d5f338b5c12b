"""Gathers prompts for `forerun train-head --prompts` from public sources into one file of JSON lines.

`python scripts/gather_prompts.py CLONES OUT [--enwik8 FILE]`. CLONES holds clones or bare mirrors of the repositories
that `prompt_sources.toml` names, as OWNER+NAME or NAME; a source that is not there is left out. What shares eight words
in a row with a public benchmark or with forerun's own evaluation is dropped, and so is what is said twice.
"""

from __future__ import annotations

import argparse
import ast
import csv
import gzip
import html
import io
import itertools
import json
import random
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

from forerun.train.prompts.mixture import built_in_prompts, read_corpus
from forerun.train.prompts.overlap import Overlap
from forerun.train.prompts.prompt import text_of
from forerun.train.prompts.questions import read_evaluation

HERE = Path(__file__).parent
SOURCES = tomllib.loads((HERE / "prompt_sources.toml").read_text(encoding="utf-8"))
TASKS: dict[str, list[str]] = tomllib.loads((HERE / "prompt_tasks.toml").read_text(encoding="utf-8"))
LONGEST = 6400  # characters: about 1500 tokens
LANGUAGES = ["Python", "JavaScript", "Java", "C++", "Go", "Rust", "C#", "TypeScript"]
TONGUES = ["German", "French", "Spanish", "Italian", "Portuguese"]


class Clones:
    """Files at the head of repositories, clones or bare ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _git(self, repository: str, *words: str) -> bytes | None:
        for name in (repository.replace("/", "+"), repository.split("/")[-1]):
            for inner in ("repo/.git", "repo", ".git", "."):
                where = self.folder / name / inner
                if (where / "HEAD").is_file():
                    run = subprocess.run(["git", f"--git-dir={where}", *words], capture_output=True, check=False)
                    return run.stdout if run.returncode == 0 else None
        return None

    def text(self, repository: str, path: str, commit: str = "HEAD") -> str:
        """A file's text; empty when it is not there."""
        found = self._git(repository, "show", f"{commit}:{path}") or b""
        return (gzip.decompress(found) if path.endswith(".gz") and found else found).decode("utf-8", "replace")

    def names(self, repository: str, below: str, ending: str) -> list[str]:
        """Paths of files."""
        listed = (self._git(repository, "ls-tree", "-r", "--name-only", "HEAD", below) or b"").decode()
        return [name for name in listed.splitlines() if name.endswith(ending)]

    def lines(self, repository: str, path: str) -> list[dict[str, object]]:
        """A file of JSON lines."""
        return [json.loads(line) for line in self.text(repository, path).split("\n") if line.strip()]

    def newest_below(self, repository: str, path: str, size: int) -> str:
        """The newest version of a file that is smaller than so many bytes."""
        commits = (self._git(repository, "log", "--format=%H", "-400", "HEAD", "--", path) or b"").decode().split()
        for commit in commits:
            told = self._git(repository, "cat-file", "-s", f"{commit}:{path}")
            if told is not None and int(told) < size:
                return self.text(repository, path, commit)
        return ""


def gsm8k(clones: Clones, chance: random.Random) -> Iterator[str]:
    for entry in clones.lines("openai/grade-school-math", "grade_school_math/data/train.jsonl"):
        ending = chance.choice(["", "", "", "", " Let's think step by step.", "\nShow your work.", "\nAnswer:"])
        yield str(entry["question"]) + ending


def gpteacher(clones: Clones, _: random.Random) -> Iterator[str]:
    for path in ("Codegen/codegen-instruct.json", "Roleplay/roleplay-simple-deduped-roleplay-instruct.json"):
        for entry in json.loads(clones.text("teknium1/GPTeacher", path) or "[]"):
            yield "\n\n".join(part for part in (entry["instruction"], entry.get("input", "")) if part)


def awesome(clones: Clones, _: random.Random) -> Iterator[str]:
    csv.field_size_limit(1 << 24)
    text = clones.newest_below("f/awesome-chatgpt-prompts", "prompts.csv", 3_500_000)
    for row in csv.DictReader(io.StringIO(text)):
        prompt = re.sub(r"\$\{\w+:([^}]*)\}", r"\1", row["prompt"] or "")
        if row.get("type", "TEXT") == "TEXT" and "${" not in prompt and prompt.isascii():
            yield prompt


def seeds(clones: Clones, _: random.Random) -> Iterator[str]:
    for entry in clones.lines("yizhongw/self-instruct", "data/seed_tasks.jsonl"):
        instances = entry["instances"]
        assert isinstance(instances, list)
        yield "\n\n".join(part for part in (str(entry["instruction"]), instances[0]["input"]) if part)


def trivia(clones: Clones, chance: random.Random) -> Iterator[str]:
    names = clones.names("uberspot/OpenTriviaQA", "categories", "")
    for name in names:
        for block in clones.text("uberspot/OpenTriviaQA", name).split("#Q ")[1:]:
            question, _, rest = block.partition("^")
            question = " ".join(question.split())
            options = [line[2:].strip() for line in rest.splitlines()[1:] if line[1:2] == " "]
            if chance.random() < 0.2 and len(options) > 2:
                yield question + "\n" + "\n".join(f"{chr(65 + at)}) {one}" for at, one in enumerate(options))
            elif question.endswith("?"):
                yield question.lower().rstrip("?") if chance.random() < 0.15 else question


def web_questions(clones: Clones, chance: random.Random) -> Iterator[str]:
    for entry in json.loads(clones.text("brmson/dataset-factoid-webquestions", "main/trainmodel.json") or "[]"):
        question = str(entry["qText"])
        yield question[0].upper() + question[1:] if chance.random() < 0.6 else question


def clinc(clones: Clones, _: random.Random) -> Iterator[str]:
    found = json.loads(clones.text("clinc/oos-eval", "data/data_full.json") or '{"train": [], "oos_train": []}')
    yield from (text for text, _ in [*found["train"], *found["oos_train"]])


def banking(clones: Clones, _: random.Random) -> Iterator[str]:
    text = clones.text("PolyAI-LDN/task-specific-datasets", "banking_data/train.csv")
    yield from (row["text"] for row in csv.DictReader(io.StringIO(text)))


def exercism(clones: Clones, chance: random.Random) -> Iterator[str]:
    repository = "exercism/problem-specifications"
    for path in clones.names(repository, "exercises", "description.md"):
        text = re.sub(r"^#.*\n+", "", clones.text(repository, path))[:LONGEST]
        for template in TASKS["exercise"]:
            yield _put(template, text=text, language=chance.choice(LANGUAGES))


def reading(clones: Clones, chance: random.Random) -> Iterator[str]:
    """Tasks over articles, stories and paragraphs; each text is asked about at most six times."""
    folder = "data/finetuning/t0_train_50k/data_per_template"
    asked: dict[str, int] = {}
    given = dict.fromkeys(SOURCES["texts"], 0)
    names = clones.names("yizhongw/self-instruct", folder, ".jsonl")
    chance.shuffle(names)
    for path in names:
        about = next((known for known in given if Path(path).name.startswith(known)), None)
        if about is None:
            continue
        for entry in clones.lines("yizhongw/self-instruct", path):
            prompt = str(entry["prompt"]).strip()
            key = " ".join(max(re.split(r"\n+", prompt), key=len).split()[5:25])
            asked[key] = asked.get(key, 0) + 1
            if asked[key] <= 6 and given[about] < SOURCES["texts"][about]["most"]:
                given[about] += 1
                yield prompt


def code(clones: Clones, chance: random.Random) -> Iterator[str]:
    found: list[str] = []
    for path in clones.names("TheAlgorithms/Python", ".", ".py"):
        found += _python_parts(clones.text("TheAlgorithms/Python", path))
    for repository, ending in (("TheAlgorithms/Go", ".go"), ("TheAlgorithms/Java", ".java")):
        names = [name for name in clones.names(repository, ".", ending) if "est" not in Path(name).name]
        chance.shuffle(names)
        for name in names[:450]:
            text = re.sub(r"\A(\s*(//.*|package .*|import .*|/\*(.|\n)*?\*/)?\n)+", "", clones.text(repository, name))
            found.append(text.strip()[:4500])
    for part in found:
        template = chance.choice(TASKS["code"])
        yield _put(template, text=part, language=chance.choice(LANGUAGES))


def _python_parts(text: str) -> list[str]:
    """Functions and classes of a module, and the whole of a short one."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    lines = text.splitlines()
    found = [text.strip()] if 600 < len(text) < 4500 else []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.end_lineno:
            part = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if 150 < len(part) < 4500:
                found.append(part)
    return found


def translation(clones: Clones, chance: random.Random) -> Iterator[str]:
    for tongue, short in (("German", "de"), ("French", "fr"), ("Spanish", "es")):
        text = clones.text(f"UniversalDependencies/UD_{tongue}-GSD", f"{short}_gsd-ud-dev.conllu")
        said = re.findall(r"^# text = (.*)$", text, re.MULTILINE)
        for at in range(0, len(said) - 4, 2):
            many = chance.choice((1, 1, 1, 2, 4))
            yield _put(chance.choice(TASKS["into_english"]), text=" ".join(said[at : at + many]), tongue=tongue)
    english = [*clinc(clones, chance), *(text for text in gsm8k(clones, chance) if len(text) < 300)]
    for text in chance.sample(english, min(1500, len(english))):
        yield _put(chance.choice(TASKS["from_english"]), text=text, tongue=chance.choice(TONGUES))


def novels(clones: Clones, chance: random.Random) -> Iterator[str]:
    books = {
        "The-Adventures-of-Sherlock-Holmes_1661": "1661.txt",
        "Pride-and-Prejudice_1342": "1342.txt",
        "Dracula_345": "345.txt",
    }
    for book, path in books.items():
        text = clones.text(f"GITenberg/{book}", path).replace("\r", "")
        inside = re.split(r"\*\*\* ?(?:START|END) OF.*", text)
        parts = [" ".join(part.split()) for part in (inside[1] if len(inside) > 1 else text).split("\n\n")]
        for passage in _stretches([part for part in parts if len(part) > 40], chance):
            yield _put(chance.choice(TASKS["story"]), text=passage, name=_some_name(passage, chance))


def encyclopedia(file: Path, chance: random.Random) -> Iterator[str]:
    """Tasks over articles of a Wikipedia dump: one article, or some passages with a question about one of them."""
    dump = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    pages = re.findall(r"<title>([^<:]+)</title>.*?<text[^>]*>(.*?)</text>", dump.decode("utf-8", "ignore"), re.DOTALL)
    articles = [(title, _plain_wiki(text)) for title, text in pages if "#redirect" not in text[:40].lower()]
    articles = [(html.unescape(title), parts) for title, parts in articles if sum(map(len, parts)) > 700]
    chance.shuffle(articles)
    for title, parts in articles:
        for passage in itertools.islice(_stretches(parts, chance), 2):
            yield _article_task(title, passage, articles, chance)


def _article_task(title: str, passage: str, articles: list[tuple[str, list[str]]], chance: random.Random) -> str:
    """One passage, sometimes between others, with something to do about it."""
    dice = chance.random()
    kind = "summary" if dice < 0.36 else "question" if dice < 0.78 else "extraction" if dice < 0.9 else "rewriting"
    name = _some_name(passage, chance) or title
    if kind == "question" and chance.random() < 0.3 and len(passage) < 2500:
        others = [next(iter(_stretches(chance.choice(articles)[1], chance)), "")[:900] for _ in range(2)]
        every = [passage, *others]
        chance.shuffle(every)
        passage = "\n\n".join(f"[{number}] {one}" for number, one in enumerate(every, 1))
    return _put(chance.choice(TASKS[kind]), text=passage[:LONGEST], title=title, name=name)


def _plain_wiki(text: str) -> list[str]:
    """Paragraphs without markup."""
    text = html.unescape(html.unescape(text))
    for _ in range(3):
        text = re.sub(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}", "", text)
    text = re.sub(r"<(ref|math|table)\b.*?</\1>|<[^>]+>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"\[\[(?:[Ii]mage|[Cc]ategory|[a-z-]+):[^\[\]]*(?:\[\[[^\]]*\]\][^\[\]]*)*\]\]", "", text)
    text = re.sub(r"\[\[(?:[^|\]]*\|)?([^\]]*)\]\]", r"\1", text)
    text = re.sub(r"\[https?://\S+ ?([^\]]*)\]", r"\1", text).replace("'''", "").replace("''", "")
    parts = [part.strip() for part in text.split("\n")]
    return [part for part in parts if len(part) > 80 and part[0] not in "=*#:|!{}<" and "|" not in part]


def _stretches(parts: list[str], chance: random.Random) -> Iterator[str]:
    """Neighbouring paragraphs together, 1000 to 6000 characters of them."""
    at = 0
    while at < len(parts):
        wanted, held = chance.choice((1000, 1500, 2000, 2500, 3000, 4000, 5000)), list[str]()
        while at < len(parts) and sum(map(len, held)) < wanted:
            held.append(parts[at])
            at += 1
        passage = "\n".join(held)[:LONGEST]
        if len(passage) > 600:
            yield passage


def _some_name(passage: str, chance: random.Random) -> str:
    names = re.findall(r"(?<=[a-z,] )[A-Z][a-z]+(?: [A-Z][a-z]+)*", passage)
    return chance.choice(names) if names else ""


def _put(template: str, **words: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: words[found[1]], template)


def forerun(_: Clones, __: random.Random) -> Iterator[str]:
    written = built_in_prompts(2026, read_corpus())
    yield from (text_of(prompt) for prompt in itertools.islice(written, SOURCES["forerun"]["most"] + 1000))


def benchmarks(clones: Clones) -> Iterator[str]:
    """Every text that must not be learned from."""
    for told in SOURCES["kept_apart"].values():
        repository, path, field = told.split()
        entries = clones.lines(repository, path)
        if not entries:
            raise SystemExit(f"{repository} is needed to keep its questions apart: clone it first")
        for entry in entries:
            value = entry[field]
            yield from map(str, value) if isinstance(value, list) else [str(value)]
    yield from (text_of(question.prompt) for question in read_evaluation(None))


GATHERED: dict[str, Callable[[Clones, random.Random], Iterator[str]]] = {
    "gsm8k": gsm8k, "gpteacher": gpteacher, "awesome": awesome, "seeds": seeds, "trivia": trivia,
    "web_questions": web_questions, "clinc": clinc, "banking": banking, "exercism": exercism, "reading": reading,
    "code": code, "translation": translation, "novels": novels, "forerun": forerun,
}  # fmt: skip


def main() -> None:
    """Write the file and say what went into it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clones", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--enwik8", type=Path)
    options = parser.parse_args()
    clones = Clones(options.clones)
    apart = Overlap(benchmarks(clones))
    seen: set[str] = set()
    kept: list[dict[str, str]] = []
    gathered = {name: write(clones, random.Random(name)) for name, write in GATHERED.items()}
    if options.enwik8:
        gathered["encyclopedia"] = encyclopedia(options.enwik8, random.Random("encyclopedia"))
    for name, prompts in gathered.items():
        every = [prompt.strip() for prompt in prompts]
        random.Random(name).shuffle(every)
        count = dropped = 0
        for prompt in every:
            key = " ".join(re.findall(r"\w+", prompt.lower()))
            if count == SOURCES[name]["most"]:
                break
            if not 8 <= len(prompt) <= LONGEST + 600 or key in seen:
                continue
            if apart.found_in(prompt):
                dropped += 1
                continue
            seen.add(key)
            kept.append({"prompt": prompt, "source": name})
            count += 1
        print(f"{name}: {count} kept of {len(every)}, {dropped} share words with a benchmark", file=sys.stderr)
    random.Random("forerun").shuffle(kept)
    options.out.write_text("".join(json.dumps(one) + "\n" for one in kept), encoding="utf-8")
    print(f"{len(kept)} prompts in {options.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
