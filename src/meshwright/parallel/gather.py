"""Parameters gathered block by block: ZeRO stage 3, or fully sharded data parallelism.

What it divides: the parameters, over the dp ranks (Rajbhandari et al. 2020 §5.3; Zhao et al. 2023, PyTorch FSDP).

    forward     gather block 0 │ run 0, gather 1 │ run 1, gather 2 │ ...
    backward    ... │ back through 2, gather 1 │ back through 1, gather 0 │ ...

A block is gathered into the buffer of its pool (`core.flat.Pool`) when its forward, and again when its backward begins;
`prefetch` blocks ahead are on their way by then; where shards lie on a tier, the last of these is being read and not
gathered yet. With `keep_gathered` each block has a buffer of its own, and stays
gathered until the step ends.
What it needs: that every rank runs all blocks of a stage in order. What it costs: phase `gather` in `cost.traffic`,
the pool in `cost.memory`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.comm.mesh import Mesh
from meshwright.core.errors import RankError
from meshwright.core.flat import block_of
from meshwright.core.strategy import Strategy
from meshwright.parallel.layers import layers_of
from meshwright.parallel.offload.tier import Handle
from meshwright.parallel.shards import Started, gather_start
from meshwright.parallel.states import FlatBucket, FlatStates

_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """What is gathered as one."""

    name: str
    buckets: tuple[FlatBucket, ...]
    buffer: int
    spans: bool
    """Other blocks run between its first and its last module: it stays gathered meanwhile."""


class Gatherer:
    """Has each block's parameters there while it runs.

    Attributes:
        blocks: in forward order; none where parameters are kept whole.
        most_gathered: the largest number of blocks that were gathered, or on their way, at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Mapping[int, nn.Module],
        states: FlatStates,
        mesh: Mesh,
        strategy: Strategy,
    ) -> None:
        self._mesh = mesh
        self._keeps, self._prefetch = strategy.keeps_gathered, strategy.prefetch
        modules = {} if states.keeps_whole_parameters else _modules(model, states)
        self.blocks = _blocks(states, modules)
        self._reading: dict[int, Sequence[Handle]] = {}
        """Blocks whose shards come from a tier."""
        self._reads = any(not isinstance(b.own_parameters, torch.Tensor) for b in states.buckets)
        self._running: dict[int, Started] = {}
        self._gathered: set[int] = set()
        self._passed: list[int] = []
        index_of = {block.name: index for index, block in enumerate(self.blocks)}
        runs = {stage: [index_of[modules[m]] for m in part.modules() if m in modules] for stage, part in stages.items()}
        self._forward_order = {stage: list(dict.fromkeys(run)) for stage, run in runs.items()}
        self._backward_order = {stage: list(dict.fromkeys(reversed(run))) for stage, run in runs.items()}
        self._stage, self._run, self._order = min(stages), "forward", list[int]()
        """What runs, and the blocks that it needs."""
        self._comes_back: set[tuple[int, int]] = set()
        """(stage, block) that backward goes through: not those in front of the first trained parameter."""
        self.most_gathered = 0
        for module, name in modules.items():
            self._hook(module, index_of[name])

    def _hook(self, module: nn.Module, index: int) -> None:
        def on_output(_: nn.Module, inputs: object, out: torch.Tensor) -> None:
            if out.requires_grad:
                self._comes_back.add((self._stage, index))
                out.register_hook(lambda grad: self._open(index))

        module.register_forward_pre_hook(lambda _, inputs: self._open(index))
        module.register_forward_hook(on_output)

    def forward(self, stage: int) -> AbstractContextManager[None]:
        """Around the forward of one micro-batch on a stage."""
        return self._pass(stage, "forward", self._forward_order[stage]) if self.blocks else _NOTHING

    def backward(self, stage: int) -> AbstractContextManager[None]:
        """Around the backward of one micro-batch on a stage."""
        order = [index for index in self._backward_order[stage] if (stage, index) in self._comes_back]
        return self._pass(stage, "backward", order) if self.blocks else _NOTHING

    @contextmanager
    def _pass(self, stage: int, run: str, order: list[int]) -> Iterator[None]:
        self._stage, self._run, self._order = stage, run, order
        self._passed.clear()
        yield
        self._check_order(None)
        if not self._keeps:
            self._gathered.clear()

    def release(self) -> None:
        """Parameters have changed: nothing that was gathered counts any more."""
        self._gathered.clear()

    def _open(self, index: int) -> None:
        """Return when block `index` is gathered; whatever ran before it is done, and the next ones are on their way."""
        if index in self._passed:
            return
        self._check_order(index)
        self._passed.append(index)
        if not self._keeps:
            self._gathered = {i for i in self._gathered if self.blocks[i].spans}
        with self._mesh.ledger.phase("gather"):
            self._start(index)
            done = len(self._passed)
            ahead = self._order[done : done + self._prefetch]
            for near in ahead[: self._prefetch - self._reads]:
                self._start_ahead(near)
            for far in ahead:
                self._read_ahead(far)
            self._running.pop(index, _DONE).wait()
        self._gathered.add(index)

    def _start(self, index: int) -> None:
        if index in self._gathered or index in self._running:
            return
        self._read(index)
        for handle in self._reading.pop(index):
            handle.wait()
        works = [gather_start(b.parameters, b.shard, b.way.scatter, self._mesh) for b in self.blocks[index].buckets]
        self._running[index] = _All(works)

    def _read(self, index: int) -> None:
        """Start to have this rank's shards there."""
        if any(index in blocks for blocks in (self._gathered, self._running, self._reading)):
            return
        self._reading[index] = [bucket.read_start() for bucket in self.blocks[index].buckets]
        self.most_gathered = max(self.most_gathered, len(self._gathered) + len(self._running) + len(self._reading))

    def _start_ahead(self, index: int) -> None:
        """Unless its memory is still in use."""
        if self._is_free(index):
            self._start(index)

    def _read_ahead(self, index: int) -> None:
        """Likewise, of what comes from a tier."""
        if self._reads and self._is_free(index):
            self._read(index)

    def _is_free(self, index: int) -> bool:
        buffer, used = self.blocks[index].buffer, (*self._gathered, *self._running, *self._reading)
        return all(self.blocks[i].buffer != buffer for i in used if i != index)

    def _check_order(self, index: int | None) -> None:
        """`index` must be the next block of this pass; None: there must be none."""
        done = len(self._passed)
        expected = self._order[done] if done < len(self._order) else None
        if expected is not None and index != expected:
            raise RankError(
                f"rank {self._mesh.rank}: block `{self.blocks[expected].name}` was skipped in {self._run}; with zero=3 "
                f"all ranks gather its parameters together, so every rank must run every block, in order"
            )


@dataclass(frozen=True, slots=True)
class _All:
    works: Sequence[Started] = ()

    def wait(self) -> None:
        for work in self.works:
            work.wait()


_DONE = _All()


def _modules(model: nn.Module, states: FlatStates) -> dict[nn.Module, str]:
    """Module whose forward needs a block → the block's name, in the order in which modules run.

    Of a layer the whole layer; of the model's ends each module that has parameters.
    """
    layers = {f"layers.{name}": layer for name, layer in layers_of(model).items()}
    block_of_leaf = {
        module: block_of(placement)
        for placement in states.placements
        if placement.tile is None
        for module, _ in states.owners.get(placement.name, ())
    }
    found = {}
    for module in model.modules():
        block = block_of_leaf.get(module)
        if block is not None:
            found[layers.get(block, module)] = block
    return found


def _blocks(states: FlatStates, modules: dict[nn.Module, str]) -> tuple[Block, ...]:
    pool, order = states.parameter_pool, list(modules.values())
    if pool is None:
        return ()
    return tuple(
        Block(
            name,
            tuple(bucket for bucket in states.buckets if bucket.layout.block == name),
            pool.buffer_of[name],
            spans=len(set(order[order.index(name) : len(order) - order[::-1].index(name)])) > 1,
        )
        for name in dict.fromkeys(order)
    )
