"""`meshwright calibrate`: a cluster file whose figures are measured."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.drawing import check_outputs, write
from meshwright.core.errors import InputError
from meshwright.core.sources import cores_of_rank, load_cluster
from meshwright.core.units import counted, format_bytes
from meshwright.run.environment import detect
from meshwright.run.launch import enter_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.core.cluster import ClusterSpec
    from meshwright.rehearse.measure import Measured
    from meshwright.rehearse.step_fit import TimedStep


STEP_TURNS = 7
"""Measured steps of each small model on CPU ranks."""


def calibrate_command(
    cluster: Annotated[
        str, typer.Argument(help="Nodes and devices, for example local:4 or, under torchrun, 2x8xh100.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The cluster file.")],
    seconds: Annotated[float, typer.Option(min=0.01, max=60, help="About how long each figure is repeated.")] = 0.3,
) -> None:
    """Measure this cluster's devices and links; `plan` takes the file in place of a cluster's name."""
    spec = load_cluster(cluster)
    check_outputs({"--out": out})
    if spec.num_nodes > 1 and detect(os.environ) is None:
        raise InputError(
            f"cluster `{spec.name}` has {spec.num_nodes} nodes, and this command alone reaches one: start it on "
            f"each with torchrun or Slurm, or calibrate one node (`{spec.devices_per_node}x...`)"
        )
    if enter_ranks(sys.argv[1:], spec.num_devices) is not None:
        _calibrate(spec, out, seconds)


def _calibrate(spec: ClusterSpec, out: Path, seconds: float) -> None:
    """In a rank."""
    from rich.console import Console

    from meshwright.comm.mesh import Mesh, start
    from meshwright.core.axes import DP, PP
    from meshwright.rehearse.calibrate import calibrated
    from meshwright.rehearse.measure import measure
    from meshwright.rehearse.step_fit import with_steps
    from meshwright.run.steps import calibration_plans, time_steps

    start("cpu" if spec.backend == "gloo" else "cuda")
    by_node = Mesh.create({DP: spec.num_devices}, dp_local=spec.devices_per_node)
    in_line = Mesh.create({PP: spec.num_devices})
    with Console(stderr=True, quiet=by_node.rank > 0).status("measuring") as status:
        measured = measure(by_node, in_line, seconds, lambda what: status.update(f"measuring {what}"))
        world = detect(os.environ)
        source = f"measured by meshwright calibrate, {world.world_size if world else 1} ranks"
        found = calibrated(spec, measured, source, cores_of_rank(spec))
        steps: Sequence[TimedStep] = ()
        if spec.backend == "gloo":
            plans = calibration_plans(found)
            steps = time_steps(plans, STEP_TURNS, lambda what: status.update(f"measuring {what}"))
            found = with_steps(found, steps)
    if by_node.rank == 0:
        write(out, found.to_toml())
        _print(found, measured, steps, out)


def _print(found: ClusterSpec, measured: Measured, steps: Sequence[TimedStep], out: Path) -> None:
    from rich.table import Table

    from meshwright.rehearse.calibrate import fit_error
    from meshwright.rehearse.step_fit import step_errors
    from meshwright.report.tables import report_console

    console, table = report_console(), Table("figure", "measured", title=f"{found.name}, as its ranks found it")
    for dtype, peak in found.device.peak_flops_per_s.items():
        table.add_row(f"products, {dtype}", f"{peak / 1e9:,.1f} GFLOP/s")
    profile = found.device.profile
    assert profile is not None
    table.add_row("products of usual shapes reach", f"{profile.matmul_efficiency:.0%} of that")
    table.add_row("memory", f"{format_bytes(round(found.device.memory_bandwidth_bytes_per_s))}/s")
    table.add_row("copies to the host and back", f"{format_bytes(round(measured.host_bytes_per_s))}/s")
    table.add_row("attention over long sequences", f"{profile.attention_efficiency:.0%} of products")
    server = profile.server
    for dtype, rows, rate in server.few_rows:
        table.add_row(f"served products of {counted(rows, 'row')}, {dtype}", f"{rate / 1e9:,.1f} GFLOP/s")
    if server.layer_s:
        each = (server.step_s, server.layer_s, server.sequence_s)
        step, layer, sequence = (f"{seconds * 1e6:,.0f} µs" for seconds in each)
        table.add_row("a server's own code", f"{step} a step, {layer} a layer, {sequence} a sequence")
    for name, link in (("within a node", found.intra_link), ("between nodes", found.inter_link)):
        if any(call.link == ("intra" if name == "within a node" else "inter") for call in measured.calls):
            table.add_row(
                f"link {name}", f"{format_bytes(round(link.bandwidth_bytes_per_s))}/s, {link.latency_s * 1e6:,.0f} µs"
            )
            table.add_row("  of which collectives reach", f"{link.collective_share:.0%}")
    table.add_row("compute beside traffic", f"{profile.overlap_slowdown:.2f} × its time alone")
    if steps:
        host = profile.host
        times = (host.layer_s, host.micro_batch_s, host.step_s, host.call_s)
        table.add_row("Python of a layer, micro-batch, step, call", ", ".join(f"{1e3 * t:.2f} ms" for t in times))
        table.add_row("passes of an update, of streams", f"{profile.optimizer_passes:.1f}, {profile.stream_passes:.1f}")
        errors = ", ".join(f"{100 * error:+.0f}%" for error in step_errors(found, steps))
        table.add_row("training steps: forecast is off by", errors)
    for primitive, error in fit_error(found, measured).items():
        table.add_row(f"{primitive}: forecast is off by", f"{error:.0%} (median over sizes)")
    console.print(table)
    console.print(f"cluster written to {out}", highlight=False, soft_wrap=True)
