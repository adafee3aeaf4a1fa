"""A schedule added from outside the package trains like those inside it: the runtime reads any program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize("strategy", [{"pp": 3}, {"pp": 2, "dp": 2, "zero": 1}], ids=["pp3", "pp2-dp2"])
def test_it_computes_what_one_process_computes(
    ranks: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: dict[str, int]
) -> None:
    (tmp_path / "last_first.py").write_text(LAST_FIRST)
    monkeypatch.setattr(orders, "__path__", [*orders.__path__, str(tmp_path)])
    plan = run_plan(qwen3(), schedule="last-first", precision="fp64", **strategy)
    found = ranks(mismatch_on_rank, plan.strategy.world_size, plan.to_toml(), str(tmp_path), timeout_s=120)
    assert found == [None] * plan.strategy.world_size
