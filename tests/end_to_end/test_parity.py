"""`meshwright parity` in real ranks: it passes, and it names what is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end import shell
from tests.end_to_end.tiny import make_plan, tiny_model

TWICE = """
import os
if "RANK" in os.environ:  # in ranks only: the launcher sums nothing
    from meshwright.comm import collectives
    once = collectives.all_reduce_start
    def twice(x, axis, op="sum"):
        is_gradient = axis.name == "dp" and x.numel() > 2  # not the counts of tokens
        return once(x.mul_(2) if is_gradient else x, axis, op)
    collectives.all_reduce_start = twice
"""


@pytest.mark.slow
def test_a_right_layout_passes(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    make_plan(tiny_model(tmp_path), tp=2).save(plan)
    done = shell.meshwright("parity", plan)
    assert done.status == 0, done.err
    assert "precision=fp64 for fp32" in done.out
    assert done.out.splitlines()[-1].startswith("pass: gradients, norms, losses, weights")


def test_a_broken_reduction_is_named(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    make_plan(tiny_model(tmp_path), dp=2).save(plan)
    (tmp_path / "sitecustomize.py").write_text(TWICE)
    done = shell.meshwright("parity", plan, more={"PYTHONPATH": str(tmp_path)})
    assert done.status == 1
    assert "pass" not in done.out
    (line,) = done.errors
    assert "gradient of `embedding.weight` (sgd step 0) differs" in line
    assert "ours / one process = 2;" in line


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    make_plan(tiny_model(tmp_path), pp=2).save(plan)
    done = shell.run([*shell.TORCHRUN, "--nproc-per-node", "2", "-m", "meshwright.cli.main", "parity", str(plan)])
    assert done.status == 0, done.err
    assert done.out.count("pass: ") == 1
