"""What orders are written with: the pattern of 1F1B, and rows that count their micro-batches by themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from meshwright.core.program import Action, Kind


def in_pairs(forwards: Sequence[Action], backwards: Sequence[Action], num_warmup: int) -> tuple[Action, ...]:
    """So many forwards first, then one forward and one backward in turn, then the backwards that are left."""
    paired = len(forwards) - num_warmup
    pairs = [action for pair in zip(forwards[num_warmup:], backwards[:paired], strict=True) for action in pair]
    return (*forwards[:num_warmup], *pairs, *backwards[paired:])


def one_forward_one_backward(stage: int, num_ranks: int, num_micro_batches: int) -> tuple[Action, ...]:
    """Row of a rank with this one stage: 1F1B, min(p−1−stage, m) forwards ahead."""
    forwards = [Action(Kind.F, stage, k) for k in range(num_micro_batches)]
    backwards = [Action(Kind.B, stage, k) for k in range(num_micro_batches)]
    return in_pairs(forwards, backwards, min(num_ranks - 1 - stage, num_micro_batches))


def with_updates(row: Sequence[Action], every: int) -> tuple[Action, ...]:
    """The row with an UPDATE of the stage behind the backward of every so many micro-batches."""
    updated: list[Action] = []
    for action in row:
        updated.append(action)
        if action.kind is Kind.B and ((action.micro_batch or 0) + 1) % every == 0:
            updated.append(Action(Kind.UPDATE, action.stage, action.micro_batch))
    return tuple(updated)


class CountedRow:
    """A row that is written action by action: each takes the micro-batch that is next for its stage.

    Backwards, whole or split, are counted together. Every method returns the row, so that calls can be chained.
    """

    def __init__(self) -> None:
        self._actions: list[Action] = []
        self._num_forwards: Counter[int] = Counter()
        self._num_backwards: Counter[int] = Counter()
        self._pending: list[Action] = []
        """Weight gradients whose input gradient is made; the oldest first."""

    def forward(self, stage: int) -> CountedRow:
        """F of the next micro-batch."""
        return self._count(Kind.F, stage, self._num_forwards)

    def backward(self, stage: int) -> CountedRow:
        """B of the next micro-batch."""
        return self._count(Kind.B, stage, self._num_backwards)

    def input_gradient(self, stage: int) -> CountedRow:
        """I of the next micro-batch; its W is pending from here on."""
        self._pending.append(Action(Kind.W, stage, self._num_backwards[stage]))
        return self._count(Kind.I, stage, self._num_backwards)

    def weight_gradient(self, stage: int | None = None) -> CountedRow:
        """W that has been pending longest, of any stage or of the given one; nothing where none is."""
        pending = [action for action in self._pending if stage in (None, action.stage)]
        for action in pending[:1]:
            self._pending.remove(action)
            self._actions.append(action)
        return self

    def weight_gradients(self, stage: int | None = None) -> CountedRow:
        """All that are pending, of any stage or of the given one."""
        pending = [action for action in self._pending if stage in (None, action.stage)]
        self._pending = [action for action in self._pending if action not in pending]
        self._actions += pending
        return self

    def num_forwards(self, stage: int) -> int:
        """Written so far."""
        return self._num_forwards[stage]

    def up_to(self, num_micro_batches: int) -> tuple[Action, ...]:
        """The row without later micro-batches: a legal order stays legal where whole micro-batches are left out."""
        return tuple(action for action in self._actions if (action.micro_batch or 0) < num_micro_batches)

    def _count(self, kind: Kind, stage: int, counter: Counter[int]) -> CountedRow:
        self._actions.append(Action(kind, stage, counter[stage]))
        counter[stage] += 1
        return self
