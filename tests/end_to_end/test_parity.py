"""`meshwright parity` in real ranks: it passes, and it names what is broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.comm.mesh import Axis
from meshwright.parallel import shards
from tests.end_to_end import shell
from tests.end_to_end.shell import Result
from tests.end_to_end.tiny import make_plan, tiny_model


def _summed_twice(patch: pytest.MonkeyPatch) -> None:
    once = shards.all_reduce_start

    def twice(x: torch.Tensor, axis: Axis, op: str = "sum") -> Any:
        is_gradient = axis.name == "dp" and x.numel() > 2  # not the counts of tokens
        return once(x.mul_(2) if is_gradient else x, axis, op)

    patch.setattr(shards, "all_reduce_start", twice)


@pytest.mark.slow
def test_a_right_layout_passes(tmp_path: Path) -> None:
    """In ranks that the command starts."""
    plan = tmp_path / "plan.toml"
    make_plan(tiny_model(tmp_path), tp=2).save(plan)
    done = shell.meshwright("parity", plan)
    assert done.status == 0, done.err
    assert "precision=fp64 for fp32" in done.out
    assert done.out.splitlines()[-1].startswith("pass: gradients, norms, losses, weights")


def test_a_broken_reduction_is_named(on_ranks: Callable[..., list[Result]], tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    make_plan(tiny_model(tmp_path), dp=2).save(plan)
    for rank, done in enumerate(on_ranks(2, "parity", plan, change=_summed_twice)):
        assert done.status == 1
        assert "pass" not in done.out
        (line,) = done.errors
        assert f"rank {rank}: gradient of `embedding.weight` (sgd step 0) differs" in line
        assert line.endswith("ours / one process = 2")


def test_under_torchrun_one_rank_speaks(on_ranks: Callable[..., list[Result]], tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    make_plan(tiny_model(tmp_path), pp=2).save(plan)
    first, second = on_ranks(2, "parity", plan)
    assert (first.status, second.status) == (0, 0), first.err + second.err
    assert first.out.count("pass: ") == 1
    assert second.out == ""
