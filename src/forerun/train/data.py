"""Training data: prompts, the target's answers to them, and the file that keeps both for a continued run."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from forerun.progress import Progress
from forerun.train.encode import PromptEncoder, check_some
from forerun.train.generate import AnsweredPrompt, answer_all
from forerun.train.prompts.files import read_prompts
from forerun.train.prompts.mixture import built_in_prompts, next_turns, read_corpus
from forerun.train.prompts.overlap import Overlap
from forerun.train.prompts.prompt import TrainingPrompt, text_of
from forerun.train.prompts.survey import nearly, survey
from forerun.train.settings import Settings
from forerun.train.target import FrozenTarget
from forerun.weights.folder import save_tensors

SELF_WRITTEN = 0.25  # of the first turns
FIRST_TURNS = 0.65  # of all prompts; the rest goes on from their answers
USER_SECOND_TURNS = 0.1  # of the answers to the user's own prompts
SHORTEST_ANSWER = 3
USER_TOKENS = 200  # longest prompt a model writes itself, and no more than two short answers


class Writer:
    """Collects prompts and has them answered. Without a limit to its time there are infinitely many seconds."""

    def __init__(
        self,
        target: FrozenTarget,
        encoder: PromptEncoder,
        ends: frozenset[int],
        settings: Settings,
        overlap: Overlap,
        progress: Progress,
        log: Callable[[str], None],
    ) -> None:
        self.target, self.encoder, self.ends, self.settings = target, encoder, ends, settings
        self.overlap, self.progress, self.log = overlap, progress, log
        self.chance = random.Random(settings.seed)
        self.sources: Counter[str] = Counter()  # what went into the data, for the model card
        self.answers: list[AnsweredPrompt] = []
        self.tokens = 0
        self._asked: set[str] = set()
        self._said: set[tuple[int, ...]] = set()

    def from_user(self, paths: Sequence[Path], seconds: float, token_limit: int) -> None:
        """Answers to the prompts of files and folders: greedy and sampled ones of each when they are few.

        Some conversations then go on, where the user's own are single questions as a rule.
        """
        began = time.monotonic()
        usable = self._usable(read_prompts(paths), told=True)
        check_some(usable)
        self.chance.shuffle(usable)
        rounds = max(1, min(4, self.settings.prompts // len(usable)))
        names = ", ".join(path.name for path in paths)
        self.sources[f"prompts given by the user ({names})"] += len(usable)
        deadline = began + (1 - USER_SECOND_TURNS) * seconds
        limit = int((1 - USER_SECOND_TURNS) * token_limit)
        talks: list[tuple[TrainingPrompt, list[int]]] = []
        for turn in range(rounds):
            heat = None if rounds == 1 else [0.0, 0.7, 0.8, 1.0][turn]
            talks += self._answer(usable[: self.settings.prompts], deadline, heat, limit)
        if self.encoder.user_turn() is None:
            return
        self.chance.shuffle(talks)
        more = self._second_turns(talks, int(USER_SECOND_TURNS * len(talks)))
        self._answer(more, began + seconds, None, token_limit)

    def built_in(self, texts: Path | None, seconds: float, token_limit: int) -> None:
        """Answers to written, self-written and continued prompts."""
        began = time.monotonic()
        first = int(FIRST_TURNS * self.settings.prompts)
        own = self._self_written(int(SELF_WRITTEN * first), 0.12 * seconds)
        written = list(itertools.islice(built_in_prompts(self.settings.seed, read_corpus(texts)), first - len(own)))
        prompts = [*written, *own]
        self.chance.shuffle(prompts)
        usable = self._usable(prompts)
        check_some(usable)
        self.sources["written for forerun or cut from Python's documentation"] += len(written)
        self.sources["written by the model itself"] += len(own)
        deadline = began + (0.12 + 0.88 * FIRST_TURNS) * seconds
        talks = self._answer(usable, deadline, None, int(0.6 * token_limit))
        more = self._second_turns(talks, self.settings.prompts - first)
        self._answer(more, began + seconds, None, token_limit)

    def _second_turns(
        self, talks: Sequence[tuple[TrainingPrompt, list[int]]], most: int
    ) -> list[tuple[TrainingPrompt, list[int]]]:
        """Conversations that go on, and tasks over what the model said."""
        said = ((prompt, self.encoder.decode(answer).strip()) for prompt, answer in talks)
        usable = self._usable(list(itertools.islice(next_turns(said, self.settings.seed), most)))
        self.sources["second turns, and tasks over the model's own texts"] += len(usable)
        return usable

    def _usable(self, prompts: Sequence[TrainingPrompt], told: bool = False) -> list[tuple[TrainingPrompt, list[int]]]:
        """New prompts of a fitting length that are not in the evaluation; `told`: the log says how wide they are."""
        fresh: list[TrainingPrompt] = []
        repeated = evaluated = 0
        for prompt in prompts:
            key = nearly(prompt)
            if key in self._asked:
                repeated += 1
            elif self.overlap.found_in(text_of(prompt)):
                evaluated += 1
            else:
                self._asked.add(key)
                fresh.append(prompt)
        encoded = [(prompt, ids) for prompt, ids in zip(fresh, self.encoder.encode_all(fresh), strict=True) if ids]
        most = min(self.settings.prompt_tokens, self.target.config.context - self.settings.answer_tokens)
        if told:
            lengths, refused = [len(ids) for _, ids in encoded], len(fresh) - len(encoded)
            for line in survey([prompt for prompt, _ in encoded], lengths, most, repeated, evaluated, refused):
                self.log(line)
        return [(prompt, ids) for prompt, ids in encoded if len(ids) <= most]

    def _self_written(self, count: int, seconds: float) -> list[TrainingPrompt]:
        """User turns sampled from the model."""
        start = self.encoder.user_turn()
        if start is None or count == 0:
            return []
        heats = [self.chance.choice((0.8, 0.9, 1.0, 1.0)) for _ in range(count)]
        deadline = time.monotonic() + seconds
        found: list[TrainingPrompt] = []
        with self.progress.task("writing prompts", count) as task:
            written = answer_all(
                self.target, [start] * count, heats, self.ends, batch=self.settings.generate_batch, deadline=deadline,
                tokens=min(USER_TOKENS, 2 * self.settings.answer_tokens), on_batch=task.advance,
            )  # fmt: skip
            for answer in written:
                ended = bool(answer.answer) and answer.answer[-1] in self.ends
                text = self.encoder.decode(answer.answer[:-1]).strip() if ended and not answer.looped else ""
                if len(text) >= 8:
                    found.append(text)
        self.log(f"{len(found)} prompts written by the model")
        return found

    def _answer(
        self,
        prompts: Sequence[tuple[TrainingPrompt, list[int]]],
        deadline: float,
        heat: float | None,
        token_limit: int,
    ) -> list[tuple[TrainingPrompt, list[int]]]:
        """Answer prompts until the deadline; new answers are kept and returned."""
        by_ids = {tuple(ids): prompt for prompt, ids in prompts}
        heats = [self._temperature() if heat is None else heat for _ in prompts]
        talks: list[tuple[TrainingPrompt, list[int]]] = []
        began, seen, loops = time.monotonic(), 0, 0
        with self.progress.task("writing answers", len(prompts)) as task:
            written = answer_all(
                self.target, [ids for _, ids in prompts], heats, self.ends, tokens=self.settings.answer_tokens,
                deadline=deadline, batch=self.settings.generate_batch, on_batch=task.advance,
            )  # fmt: skip
            for answer in written:
                seen += 1
                loops += answer.looped
                if self._keep(answer):
                    talks.append((by_ids[tuple(answer.prompt)], answer.answer))
                if self.tokens > token_limit:
                    break
        spent = time.monotonic() - began
        self.log(f"{len(talks)} of {seen} answers kept, {loops} loops cut, {self.tokens} tokens in all, {spent:.0f} s")
        return talks

    def _keep(self, answer: AnsweredPrompt) -> bool:
        key = tuple(answer.answer[:64])
        if len(answer.answer) < SHORTEST_ANSWER or (key in self._said and len(key) > 8):
            return False
        self._said.add(key)
        self.answers.append(answer)
        self.tokens += len(answer.prompt) + len(answer.answer)
        return True

    def _temperature(self) -> float:
        dice = self.chance.random()
        if dice < self.settings.greedy_share:
            return 0.0
        sampled = (dice - self.settings.greedy_share) / (1 - self.settings.greedy_share)
        return 0.7 if sampled < 0.76 else 0.8 if sampled < 0.88 else 1.0


def save_answers(file: Path, answers: Iterable[AnsweredPrompt]) -> None:
    """All answers in one file of plain tensors."""
    answers = list(answers)
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        "tokens": torch.tensor([token for answer in answers for token in (*answer.prompt, *answer.answer)]).int(),
        "prompts": torch.tensor([len(answer.prompt) for answer in answers]),
        "answers": torch.tensor([len(answer.answer) for answer in answers]),
        "heats": torch.tensor([answer.temperature for answer in answers]),
    }
    save_tensors(tensors, file)


def load_answers(file: Path) -> list[AnsweredPrompt]:
    """What `save_answers` wrote."""
    from safetensors.torch import load_file

    held = load_file(file)
    tokens = held["tokens"].tolist()
    found, at = [], 0
    sizes = zip(held["prompts"].tolist(), held["answers"].tolist(), held["heats"].tolist(), strict=True)
    for prompt, answer, heat in sizes:
        middle, end = at + prompt, at + prompt + answer
        found.append(AnsweredPrompt(tokens[at:middle], tokens[middle:end], heat, False))
        at = end
    return found
