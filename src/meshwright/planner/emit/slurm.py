"""Slurm: a batch script that starts this plan, one task per device. Source: Slurm's sbatch and srun."""

from __future__ import annotations

from meshwright.core.plan import Plan
from meshwright.planner.emit.common import Emitted
from meshwright.planner.emit.torchrun import NOTES


def emit(plan: Plan) -> Emitted:
    """The plan, and `job.sbatch`. Nothing is lost: the ranks read the plan."""
    cluster = plan.cluster
    options = {
        "job-name": f"meshwright-{plan.model.name}",
        "nodes": cluster.num_nodes,
        "ntasks-per-node": cluster.devices_per_node,
        **({} if cluster.backend == "gloo" else {"gpus-per-node": cluster.devices_per_node}),
        "exclusive": None,
    }
    head = [f"#SBATCH --{name}" + ("" if value is None else f"={value}") for name, value in options.items()]
    lines = ["#!/bin/bash", *head, "set -euo pipefail", 'srun meshwright train plan.toml --out run "$@"', ""]
    return Emitted({"plan.toml": plan.to_toml(), "job.sbatch": "\n".join(lines)}, NOTES)
