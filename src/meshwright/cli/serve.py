"""`meshwright serve`: a model behind an OpenAI-compatible server."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from meshwright.core.plan import Plan
    from meshwright.core.serving import ServingPlan
    from meshwright.serve.options import ServeOptions

OF_CACHE = {"num_blocks", "cache_bytes"}
"""Two ways to say how large the cache is."""


def serve_command(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="A Hugging Face folder, or the folder of a training run.")],
    plan: Annotated[
        Path | None, typer.Option(help="Plan file, from `plan --serve` or of a training: how to divide.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model; default: its folder.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="MESHWRIGHT_API_KEY", help="Asked of every client.")] = None,
    cache_mib: Annotated[int, typer.Option(min=1, help="Memory of the key/value cache on each rank, MiB.")] = 512,
    block_size: Annotated[int, typer.Option(min=1, max=4096, help="Tokens of one block of the cache.")] = 16,
    step_tokens: Annotated[int, typer.Option(min=1, help="Tokens that one step computes at most.")] = 256,
    max_running: Annotated[int, typer.Option(min=1, help="Sequences in one step at most.")] = 64,
    max_waiting: Annotated[int, typer.Option(min=1, help="Sequences that may wait; more get status 429.")] = 1024,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Copies of the model behind this server; default: the plan's, or one.")
    ] = None,
    preempt: Annotated[
        Literal["recompute", "swap", "auto"],
        typer.Option(help="Who leaves a full cache is computed again, swapped to the host, or what takes less."),
    ] = "recompute",
    swap_mib: Annotated[int, typer.Option(min=1, help="Memory of the host for what is swapped, a rank, MiB.")] = 512,
    prefix_cache: Annotated[bool, typer.Option(help="Whether requests share what they begin with.")] = True,
) -> None:
    """Serve a model over the OpenAI API: starts its own ranks, or takes its place among those of torchrun or Slurm."""
    from meshwright.run.environment import detect
    from meshwright.run.launch import enter_ranks
    from meshwright.run.served import open_model
    from meshwright.run.serving import Address, serve
    from meshwright.serve.options import ServeOptions
    from meshwright.serve.servable import check_servable, served_strategy

    options = ServeOptions(
        cache_bytes=cache_mib * 2**20, block_size=block_size, step_tokens=step_tokens, max_running=max_running,
        max_waiting=max_waiting, prefix_cache=prefix_cache, preempt=preempt, swap_bytes=swap_mib * 2**20,
    )  # fmt: skip
    _refuse_unused(context, preempt)
    asked = _plan(plan) if plan else None
    options = _sizes(asked, options, context)
    num_ranks = served_strategy(asked, "fp32", replicas).world_size
    _check_room(asked, options, num_ranks)

    def before() -> None:
        served = open_model(model)
        served.check_plan(asked)
        address.bind().close()
        check_servable(served.spec, served_strategy(asked, served.precision, replicas))

    address = Address(host, port, api_key)
    has_ranks = num_ranks > 1 or detect(os.environ) is not None
    if has_ranks and enter_ranks(sys.argv[1:], num_ranks, before=before) is None:
        return
    serve(model, asked, options, address, name, replicas)


def _refuse_unused(context: typer.Context, preempt: str) -> None:
    """Raises InputError where memory is given to what is not used."""
    from meshwright.cli.serving import is_typed
    from meshwright.core.errors import InputError

    if preempt == "recompute" and is_typed(context, "swap_mib"):
        raise InputError(
            "--swap-mib: with --preempt recompute nothing is swapped; add --preempt swap or auto, or leave it out"
        )


def _plan(path: Path) -> Plan | ServingPlan:
    """Of either kind. Raises UnsupportedError where one for serving cannot be served."""
    from meshwright.core.errors import UnsupportedError
    from meshwright.core.plan import Plan
    from meshwright.core.serving import ServingPlan, is_serving
    from meshwright.serve.servable import check_plan

    if not is_serving(path):
        return Plan.load(path)
    plan = ServingPlan.load(path)
    try:
        check_plan(plan)
    except UnsupportedError as error:
        raise UnsupportedError(f"{path}: {error}") from None
    return plan


def _sizes(plan: Plan | ServingPlan | None, typed: ServeOptions, context: typer.Context) -> ServeOptions:
    """The plan's sizes of cache and steps, but for those that were typed."""
    from meshwright.cli.serving import is_typed
    from meshwright.core.serving import ServingPlan

    if not isinstance(plan, ServingPlan):
        return typed
    layout = plan.layout
    sizes = {name: getattr(layout, name) for name in ("block_size", "num_blocks", "step_tokens", "max_running")}
    given = {name for name in sizes if is_typed(context, name)}
    given |= OF_CACHE if is_typed(context, "cache_mib") else set()
    return typed.model_copy(update={name: value for name, value in sizes.items() if name not in given})


def _check_room(plan: Plan | ServingPlan | None, options: ServeOptions, num_ranks: int = 1) -> None:
    """Raises InputError where the caches of so many ranks are more than this machine's memory can hold."""
    import torch

    from meshwright.core.errors import InputError
    from meshwright.core.serving import ServingPlan
    from meshwright.core.sources import this_machine
    from meshwright.core.units import counted, format_bytes
    from meshwright.cost.kv_cache import largest_kv_token_bytes

    have = this_machine().memory_bytes
    if isinstance(plan, ServingPlan) and options.num_blocks is not None:
        token_bytes = largest_kv_token_bytes(plan.model, plan.strategy)
        rank_bytes = options.num_blocks * options.block_size * token_bytes
        whose, todo = f"the plan's cache takes {format_bytes(rank_bytes)}", "give --cache-mib, or plan for local:N"
        where = f" of `{plan.cluster.name}`"
    else:
        rank_bytes, where = options.cache_bytes, ""
        whose, todo = f"--cache-mib {rank_bytes // 2**20} takes {format_bytes(rank_bytes)}", "give it less"
    num_ranks = _num_ranks_here(num_ranks)
    if rank_bytes * num_ranks > have and not torch.cuda.is_available():
        raise InputError(
            f"{whose} on each of {counted(num_ranks, 'rank')}{where}, and this machine has {format_bytes(have)} and no "
            f"GPU; {todo}"
        )
    swapped_bytes = options.swap_bytes * num_ranks * (options.preempt != "recompute")
    beside = 0 if torch.cuda.is_available() else rank_bytes * num_ranks
    if swapped_bytes + beside > have:
        raise InputError(
            f"--swap-mib {options.swap_bytes // 2**20} takes {format_bytes(options.swap_bytes)} of the host for each "
            f"of {counted(num_ranks, 'rank')}{', beside their caches' if beside else ''}, and this machine has "
            f"{format_bytes(have)}; give it less"
        )


def _num_ranks_here(num_ranks: int) -> int:
    """Of all ranks, those on this machine: under torchrun or Slurm others may be elsewhere."""
    from meshwright.run.environment import is_rank

    if not is_rank(os.environ):
        return num_ranks
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(here) if here.isdecimal() else 1
