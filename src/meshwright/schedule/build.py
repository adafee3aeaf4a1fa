"""From a schedule's name to a Program: find the order, run the passes."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

from meshwright.core.errors import InputError, ProgramError
from meshwright.core.program import Action, Kind, Program
from meshwright.core.strategy import Strategy
from meshwright.schedule import orders
from meshwright.schedule.passes.reductions import add_reductions
from meshwright.schedule.passes.transfers import add_transfers

Rows = tuple[tuple[Action, ...], ...]
Order = Callable[[int, int], Rows]
"""(num_stages, num_micro_batches) → one row of F and B per rank."""


def available_orders() -> dict[str, Order]:
    """Schedule name → order, one per module in `orders/`."""
    names = sorted(module.name for module in pkgutil.iter_modules(orders.__path__))
    modules = [importlib.import_module(f"{orders.__name__}.{name}") for name in names]
    return {module.NAME: module.order for module in modules}


def program(name: str, num_stages: int, num_micro_batches: int, reduce: bool = True) -> Program:
    """The program of one training step.

    Args:
        name: a schedule, such as `naive`, `gpipe` or `1f1b`.
        num_stages: pipeline stages.
        num_micro_batches: micro-batches per step and pipeline.
        reduce: add ARM and REDUCE; False for a step that only accumulates.

    Raises:
        InputError: no such schedule.
        ProgramError: a size below 1, or an order that cannot run.
    """
    found = available_orders()
    if name not in found:
        raise InputError(f"schedule `{name}` is not known; choose one of {', '.join(sorted(found))}")
    _check_sizes(num_stages, num_micro_batches)
    built = add_transfers(from_rows(name, found[name](num_stages, num_micro_batches)))
    return add_reductions(built) if reduce else built


def build_program(strategy: Strategy) -> Program:
    """The program of one training step of `strategy`; every data-parallel replica runs the same."""
    return program(strategy.schedule, strategy.pp, strategy.num_micro_batches)


def forward_program(num_stages: int, num_micro_batches: int) -> Program:
    """Forward only, for evaluation; a rank holds one micro-batch's activations at a time."""
    _check_sizes(num_stages, num_micro_batches)
    rows = tuple(tuple(Action(Kind.F, stage, k) for k in range(num_micro_batches)) for stage in range(num_stages))
    return add_transfers(from_rows("forward", rows))


def from_rows(name: str, rows: Rows) -> Program:
    """A program of compute actions; a stage stands on the rank whose row has its forwards.

    Raises ProgramError where a stage of the numbering has no forward.
    """
    ranks = {a.stage: rank for rank, row in enumerate(rows) for a in row if a.kind is Kind.F}
    missing = sorted(set(range(max(ranks, default=0) + 1)) - ranks.keys())
    if missing:
        raise ProgramError(f"{name}: stages {missing} have no forward; every stage from 0 to the last needs one")
    num_micro_batches = 1 + max(a.micro_batch or 0 for row in rows for a in row)
    return Program(name, rows, tuple(ranks[stage] for stage in range(len(ranks))), num_micro_batches)


def _check_sizes(num_stages: int, num_micro_batches: int) -> None:
    for what, size in (("stages", num_stages), ("micro-batches", num_micro_batches)):
        if size < 1:
            raise ProgramError(f"a pipeline of {size} {what}: at least 1 is needed")
