"""What the head has yet to read: a plain round that drafts nothing puts its features by, and many are read at once.

So plain decoding does not pay for a head that follows along. A slot's keys and values depend on nothing but its own
features and token: filled in late they are what they would have been.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.draft.mtp import MtpDrafter, Waiting
from forerun.engine.graphs import Graphs, Replay
from forerun.engine.lanes import Lanes
from forerun.kernels.interface import PassRows
from forerun.models.layers.rows import Pass

RING = 16  # rounds whose features are kept; a power of two


class Unread:
    """Of all lanes. `rounds`: the most that any of them is behind."""

    def __init__(self, lanes: Lanes, drafter: MtpDrafter, graphs: Graphs, dtype: torch.dtype) -> None:
        head = drafter.head
        self.lanes, self.head, self.pages, self.graphs = lanes, head, drafter.pool.layers, graphs
        most, device = len(lanes.position), lanes.device
        size = head.embedding.shape[1] if head.fuse_matrix is None else head.fuse_matrix.shape[1]
        self.features = torch.zeros(most, RING, size, dtype=dtype, device=device)
        self.tokens = torch.zeros(most, RING, dtype=torch.int64, device=device)
        self.behind = torch.zeros(most, dtype=torch.int32, device=device)  # slots before `lanes.position`
        self.rounds = 0
        self._reads: dict[tuple[int, int], Replay[Tensor]] = {}  # by lanes and slots

    def clear(self) -> None:
        """New sequences: nothing was put by."""
        self.behind.zero_()
        self.rounds = 0

    def put(self, lane: int, waiting: Waiting) -> None:
        """What a lane brings with it, at most as much as is ever kept."""
        count = len(waiting.tokens)
        assert count <= RING
        tokens = torch.tensor(waiting.tokens).to(self.lanes.device, non_blocking=True)
        first = waiting.start % RING
        before = min(count, RING - first)  # the end of the ring
        for into, source in ((self.features[lane], waiting.features), (self.tokens[lane], tokens)):
            into[first : first + before] = source[:before]
            into[: count - before] = source[before:]
        self.behind[lane] = count
        self.rounds = max(self.rounds, count)

    def keep(self, features: Tensor, chosen: Tensor, before: Tensor, accepted: Tensor) -> None:
        """Part of a captured round of one row per lane."""
        from forerun.kernels.gpu.keeping import keep

        into = self.features, self.tokens, self.behind, self.lanes.drafted
        keep(features, chosen.flatten(), before, accepted, *into)

    def read(self, count: int) -> None:
        """Let the head of the first `count` lanes read all there is."""
        slots = RING
        while self.rounds:
            while slots > self.rounds:
                slots //= 2
            self.reading(count, slots)()
            self.rounds -= slots

    def prepare(self, count: int) -> None:
        """Capture what `read` may want."""
        for power in range(RING.bit_length()):
            self.reading(count, 1 << power)

    def may_go_on(self, count: int) -> bool:
        """Can another round be put by at once? Not where a graph must be captured for that."""
        return self.rounds < RING or (count, RING) in self._reads

    def reading(self, count: int, slots: int) -> Replay[Tensor]:
        """As a graph. That a capture runs once does not count."""
        key = (count, slots)
        if key not in self._reads:
            behind = self.behind.clone()
            self._reads[key] = self.graphs.capture(lambda: self._read(*key))
            self.behind.copy_(behind)
        return self._reads[key]

    def _read(self, count: int, slots: int) -> Tensor:
        """The first `slots` slots that wait. Where fewer do, later ones are filled with what nobody will look at."""
        lanes, behind = self.lanes, self.behind[:count]
        start = (lanes.position[:count] - behind).clamp_(min=0)  # of nobody's lanes it may be anything
        row = (start[:, None] + torch.arange(slots, device=lanes.device)) % RING  # [lanes, slots]
        lane = torch.arange(count, device=lanes.device)[:, None]
        features, tokens = self.features[lane, row], self.tokens[lane, row].flatten()
        rows = PassRows.uniform(slots, start, [lanes.head_table[:count]], lanes.slot[:count])
        batch = Pass(tokens, rows, self.pages, None, False)
        self.head.fill(self.head.fuse(features.flatten(0, 1), False), batch)
        return behind.sub_(slots).clamp_(min=0)
