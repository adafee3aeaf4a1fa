"""A schedule added from outside the package trains like those inside it: the runtime reads any program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.core.errors import InputError, RuleError
from meshwright.core.plan import Plan
from meshwright.run.engine import make_mesh
from meshwright.run.parity import find_mismatch
from meshwright.schedule import orders
from tests.parallel.layouts import qwen3
from tests.parallel.runs import run_plan
from tests.schedule.test_outside import LAST_FIRST


def mismatch_on_rank(rank: int, world: int, plan: str, folder: str) -> str | None:
    """The first mismatch with one process, as text."""
    orders.__path__.append(folder)
    try:
        planned = Plan.from_toml(plan)
        mismatch = find_mismatch(planned, make_mesh(planned))
    finally:
        orders.__path__.remove(folder)
    return None if mismatch is None else str(mismatch)


MINE = """F0@0,F1@0,F2@0,B2@0,B0@0,B1@0
F0@1,I0@1,F1@1,F2@1,B2@1,W0@1,B1@1
"""
"""Compute actions alone, in an order of nobody else's: the last micro-batch comes back before the second."""


def own_mismatch_on_rank(rank: int, world: int, plan: str) -> str | None:
    planned = Plan.from_toml(plan)
    mismatch = find_mismatch(planned, make_mesh(planned))
    return None if mismatch is None else str(mismatch)


def test_a_table_of_ones_own_computes_what_one_process_computes(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    table = tmp_path / "mine.csv"
    table.write_text(MINE)
    plan = run_plan(qwen3(), batch=3, pp=2, schedule=str(table), precision="fp64")
    assert ranks(own_mismatch_on_rank, 2, plan.to_toml(), timeout_s=60) == [None, None]
    with pytest.raises(RuleError, match="the file is for 2 ranks and 3 micro-batches"):
        run_plan(qwen3(), batch=4, pp=2, schedule=str(table), precision="fp64")
    table.write_text("F0@0,B0@0\nF0@1,B0@1,X\n")
    with pytest.raises(InputError, match=r"mine.csv, line 2, cell 3: `X` is not an action"):
        Plan.from_toml(plan.to_toml())


@pytest.mark.parametrize("strategy", [{"pp": 3}, {"pp": 2, "dp": 2, "zero": 1}], ids=["pp3", "pp2-dp2"])
def test_it_computes_what_one_process_computes(
    ranks: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: dict[str, int]
) -> None:
    (tmp_path / "last_first.py").write_text(LAST_FIRST)
    monkeypatch.setattr(orders, "__path__", [*orders.__path__, str(tmp_path)])
    plan = run_plan(qwen3(), schedule="last-first", precision="fp64", **strategy)
    found = ranks(mismatch_on_rank, plan.strategy.world_size, plan.to_toml(), str(tmp_path), timeout_s=120)
    assert found == [None] * plan.strategy.world_size
