"""Who runs now: admission by pages, prefill one chunk at a time, parking when pages run out."""

from __future__ import annotations

import time
from collections import deque

from forerun.cache.chain import Found, PageChain
from forerun.cache.pages import PagePool
from forerun.draft.arms import MAX_DEPTH
from forerun.engine.request import Request
from forerun.engine.sequence import Sequence, Status
from forerun.errors import ForerunError
from forerun.models.layers.config import DecoderConfig

DEFAULT_ANSWER = 512  # tokens reserved for an answer: most end before; a longer one grows by as many where pages abound


class Scheduler:
    """First come, first served. Whoever was admitted keeps its pages; the youngest gives way when growth needs them."""

    def __init__(self, pool: PagePool, context: int, max_sequences: int, parked_limit: int) -> None:
        """`parked_limit`: bytes of copies in host memory beyond which nobody is parked to let another begin."""
        self.pool, self.context, self.max_sequences, self.parked_limit = pool, context, max_sequences, parked_limit
        self.preemptions = 0  # times that somebody had to give way
        self.waiting: deque[Sequence] = deque()
        self.follows = False  # the first of them waits for a prompt that another one reads, and for no room
        self.active: list[Sequence] = []  # admitted, oldest first: prefilling, running, paused or parked

    @property
    def longest(self) -> int:
        """Tokens of prompt and answer together that one sequence may have: it may fill the whole cache."""
        return min(self.context, self.pool.count * self.pool.page)

    def reservation(self, request: Request) -> int:
        """Tokens to hold pages for before a request may start. A maximum is a limit and no reservation: it grows."""
        answer = DEFAULT_ANSWER if request.max_tokens is None else min(DEFAULT_ANSWER, request.max_tokens)
        return self._at_most(len(request.prompt) + answer + MAX_DEPTH)

    def _at_most(self, tokens: int) -> int:
        """No more than the context has with its drafts, nor than the cache holds."""
        return min(tokens, self.context + MAX_DEPTH, self.pool.count * self.pool.page)

    def check(self, request: Request, model: DecoderConfig) -> None:
        """Refuse one that can never run: tokenizers may have tokens that the model lacks, and room has an end."""
        prompt = len(request.prompt)
        if max(request.prompt) >= model.vocab:
            raise ForerunError(
                f"the prompt has token {max(request.prompt)}, and the model's tokens end at {model.vocab - 1}"
            )
        if prompt >= self.context:
            more = " or raise max context" if self.context < model.context else ""
            raise ForerunError(f"the prompt has {prompt} tokens and the context holds {self.context}: shorten it{more}")
        if prompt >= self.longest:
            raise ForerunError(
                f"the prompt has {prompt} tokens and the cache holds {self.longest}: "
                "shorten it, or load with more memory for the cache (--memory)"
            )

    def admit(self) -> list[Sequence]:
        """Bring back parked sequences, oldest first, then start waiting ones in order. Returns those that start."""
        begun = list[Sequence]()
        for sequence in self.active:
            if sequence.status is Status.PARKED:
                if self._busy() >= self.max_sequences:
                    return begun  # none may overtake it
                if sequence.cache.parked is not None:
                    if not self._reclaim(min(sequence.cache.parked_pages + 1, self.pool.count), slots=1):
                        return begun
                    sequence.cache.unpark()
                sequence.status = sequence.resumed_status
        self.follows = False
        while self.waiting and self._busy() < self.max_sequences:
            sequence = self.waiting[0]
            if sequence.status is not Status.WAITING:  # a second Ctrl-C came when it had just begun
                self.waiting.popleft()
                continue
            if not self._begin(sequence):
                return begun
            if sequence not in self.active:  # a second Ctrl-C may have come here before
                self.active.append(sequence)
            sequence.status, sequence.admitted = Status.PREFILL, time.perf_counter()
            self.waiting.popleft()
            begun.append(sequence)
        return begun

    def _begin(self, sequence: Sequence) -> bool:
        """Give a sequence its pages, those with the beginning of its prompt among them. False: not yet."""
        cache, tokens = sequence.cache, self.reservation(sequence.request)
        if cache.pages or cache.slot is not None or (cache.chain is not None and cache.chain.pages):
            cache.release()  # what an interruption has left it
        found, chain = self._look_up(sequence), cache.chain
        if chain is not None:
            self.follows = self._is_being_read(chain, len(found.pages) * self.pool.page)
            if self.follows:
                return False
            chain.take(found)  # first: nothing may remove them now
        there = sum(page.resident for page in found.pages)  # others come back from host memory
        if not self._reclaim(self.pool.pages_for(tokens) - there, slots=1, begins=True):
            if chain is not None:
                chain.release()
            return False
        cache.begin_with(found)
        cache.grow(tokens)
        sequence.counters.queried = 0 if chain is None else sequence.prompt_length
        sequence.counters.cached = sequence.planned = cache.length
        return True

    def _look_up(self, sequence: Sequence) -> Found:
        """What the cache has of the prompt of a sequence that waits."""
        request, cache, index = sequence.request, sequence.cache, self.pool.prefix
        media = request.media
        if cache.chain is None and index.enabled:
            names = () if media is None else media.page_names(index.page)
            salt = request.cache_salt.encode()
            cache.chain = PageChain(index, sequence.tokens, sequence.prompt_length, salt, names)
        if cache.chain is None or request.prompt_logprobs:  # which want every row of the prompt
            return Found([], 0)
        return cache.chain.look_up(None if media is None else media.border)

    def _is_being_read(self, chain: PageChain, found: int) -> bool:
        """Is a sequence reading the same beginning now, so that more of the prompt will be found soon?

        It waits for those only that read in this very step: one that is parked, paused or over holds up none.
        """
        for other in self.active:
            theirs, length = other.cache.chain, other.cache.length
            if other.status is Status.PREFILL and theirs is not None:
                shared = chain.shared_with(theirs)
                if shared > max(found, length) and theirs.will_offer(shared, length) > max(found, length):
                    return True
        return False

    def take_back(self, sequence: Sequence) -> None:
        """Let a sequence that was paused or had ended take part again, as soon as there is room in the rounds.

        Where somebody waits for a place already, `admit` decides who is older.
        """
        others_wait = any(other.status is Status.PARKED for other in self.active)
        if sequence not in self.active:
            sequence.status = Status.WAITING
            self.waiting.append(sequence)
        elif others_wait or sequence.cache.parked is not None or self._busy() >= self.max_sequences:
            sequence.status = Status.PARKED
        else:
            sequence.status = sequence.resumed_status

    def _busy(self) -> int:
        return sum(s.status in (Status.PREFILL, Status.RUNNING) for s in self.active)

    def _reclaim(self, pages: int, slots: int = 0, begins: bool = False) -> bool:
        """See that `pages` and `slots` are free; whoever sits idle on some is moved to host memory.

        Where copies have reached their limit, those that have ended are given up, and one that only `begins` waits.
        """
        for sequence in self.active:
            if self.pool.free >= pages and self.pool.free_slots >= slots:
                break
            waits = sequence.status in (Status.FINISHED, Status.PAUSED, Status.PARKED)
            if waits and sequence.cache.pages:
                full = self.pool.parked_bytes >= self.parked_limit
                if full and sequence.status is Status.FINISHED:
                    sequence.given_up = True
                    sequence.cache.release()
                elif not (full and begins):
                    sequence.cache.park()
        return self.pool.free >= pages and self.pool.free_slots >= slots

    def prefilling(self) -> list[Sequence]:
        """Sequences whose prompts are not yet in the cache, oldest first."""
        return [s for s in self.active if s.status is Status.PREFILL]

    def running(self) -> list[Sequence]:
        """Sequences that take part in the next round."""
        return [s for s in self.active if s.status is Status.RUNNING]

    def has_room(self, sequence: Sequence, tokens: int) -> bool:
        """Can it hold so many tokens without another one giving way?"""
        return sequence.cache.missing(tokens) <= self.pool.free

    def make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Let a sequence hold `tokens` tokens, parking the youngest others if need be. False when it cannot."""
        if not sequence.cache.missing(tokens):
            return True  # most rounds end here
        while not self._reclaim(sequence.cache.missing(tokens)):
            # One that still reads its prompt gives way too: else an answer would end for want of pages that come back.
            others = [s for s in self.active if s.status in (Status.RUNNING, Status.PREFILL) and s is not sequence]
            if not others:
                return False
            youngest = others[-1]
            if self.active.index(youngest) < self.active.index(sequence):
                youngest = sequence  # it is the youngest itself
            youngest.status = Status.PARKED  # first: nobody may go on without its pages
            youngest.cache.park()
            self.preemptions += 1
            if youngest is sequence:
                return False
        # A device that runs rounds ahead stops when a sequence grows: it takes many pages while all could do the same.
        stride = self._at_most(tokens + DEFAULT_ANSWER)
        if self.pool.free >= sequence.cache.missing(stride) * len(self.active):
            tokens = max(tokens, stride)
        sequence.cache.grow(tokens)
        return True

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and free its pages."""
        sequence.given_up = True
        sequence.cache.release()  # first: what holds pages is among those who are counted
        if sequence in self.active:
            self.active.remove(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """Take it out of the queue, if it is there; one whose beginning was interrupted begins anew."""
        if sequence in self.waiting:
            sequence.cache.release()
            if sequence in self.active:
                self.active.remove(sequence)
            self.waiting.remove(sequence)

    def recount(self) -> None:
        """Somebody was interrupted inside: free what was left to nobody."""
        self.pool.recount([sequence.cache for sequence in dict.fromkeys([*self.active, *self.waiting])])

    @property
    def idle(self) -> bool:
        """Nothing to do, until somebody comes, goes on or leaves."""
        return all(s.status in (Status.FINISHED, Status.PAUSED) for s in self.active) and not self._may_begin()

    def _may_begin(self) -> bool:
        """Is there somebody waiting whom `admit` may let in? Not where copies are at their limit."""
        if not self.waiting or self.pool.parked_bytes < self.parked_limit:
            return bool(self.waiting)
        found = self._look_up(self.waiting[0]).pages
        used = sum(page.users > 0 and page.resident for page in found)  # others have them too
        pages = self.pool.pages_for(self.reservation(self.waiting[0].request)) - used
        given_up = any(s.status is Status.FINISHED and s.cache.pages for s in self.active)
        return given_up or (self.pool.free >= pages and self.pool.free_slots >= 1)
