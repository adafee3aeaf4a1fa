"""Seconds that each stage of a training step takes, as lists of named terms; :mod:`meshwright.cost.step` puts them
together.

    forward, backward       compute, collectives within layers, gathering of parameters, copies of kept activations
    reduction               of gradients, which backward may hide
    after                   scalar reductions, gather of updated parameters
    optimizer               update, with what it moves between tiers

Backward counts twice the FLOPs of forward.

Sources: Korthikanti et al. 2022 (FLOPs), Rajbhandari et al. 2020 §7 (ZeRO).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.core.cluster import ClusterSpec
from meshwright.core.job import Job
from meshwright.core.precision import NUM_MOMENTS
from meshwright.core.profile import Stack
from meshwright.core.sharding import sharding
from meshwright.core.strategy import Strategy
from meshwright.cost.compute import Collectives, Compute, Passes
from meshwright.cost.memory import moved_units
from meshwright.cost.offload import OffloadForecast, TierSeconds, streamed_s, tier_seconds
from meshwright.cost.sending import of_attention, of_experts, transfers_s
from meshwright.cost.setting import Setting
from meshwright.cost.step import StageCosts
from meshwright.cost.terms import TimeTerm, total_s


@dataclass(frozen=True, slots=True)
class Sent:
    """What a rank's collectives take in a step."""

    seconds: Mapping[str, float]
    """By phase."""
    num_reductions: int
    """Calls that reduce gradients."""


@dataclass(frozen=True, slots=True)
class RankStates:
    """What a rank updates, with all its stages."""

    num_parameters: int
    """Elements."""
    num_spread: int = 0
    """Of them, of experts that only some data-parallel ranks hold."""
    moved: OffloadForecast | None = None
    """What of it is offloaded."""


def in_layers(strategy: Strategy, phases: Mapping[str, float]) -> Collectives:
    """Of one micro-batch."""
    m, passes = strategy.micro_batches_per_stage, ("forward", "recompute", "backward")
    kinds = [[phases.get(key(phase), 0.0) / m for phase in passes] for key in (str, of_attention, of_experts)]
    return Collectives(*(Passes(*seconds) for seconds in kinds))


def stage_costs(
    setting: Setting, strategy: Strategy, stage: int, compute: Compute, sent: Sent, states: RankStates
) -> StageCosts:
    """Price a stage.

    Args:
        compute: what it computes for a micro-batch, as from :func:`meshwright.cost.compute.stage_compute`.
        sent: what a rank of the stage sends in one step; where it has several stages, of what each micro-batch sends
            this stage's part alone.
        states: what the rank updates, with all its stages.
    """
    job, cluster, stack = setting.job, setting.cluster, setting.stack
    phases, moved = sent.seconds, states.moved
    m, per_rank = strategy.micro_batches_per_stage, strategy.stages_per_rank
    moves = _moves(setting, strategy, stage, compute, phases, moved)
    update_s = strategy.num_updates * stack.optimizer_passes
    update_s *= optimizer_s(states.num_parameters, job, strategy, cluster, states.num_spread)
    step_s = stack.step_s + (cluster.device.profile.host.step_s if cluster.device.profile else 0.0)
    tiers = tier_seconds(moved, cluster) if moved else TierSeconds()
    if moved:
        update_s = streamed_s(update_s, tiers.update_s, moved.num_groups)
    forward, backward = (*compute.forward, *moves.forward), (*compute.backward, *moves.backward)
    beside_s = (
        m * per_rank * (total_s(compute.forward) + total_s(compute.backward)) if strategy.offload.delayed else 0.0
    )
    return StageCosts(
        forward=forward,
        backward=backward,
        reduction=(TimeTerm("gradients", phases.get("gradients", 0.0)),),
        num_reductions=sent.num_reductions,
        num_reducing=m * per_rank if strategy.reduces_each else strategy.num_updates,
        after=_after(phases, total_s(forward), stack),
        optimizer=(TimeTerm("optimizer", max(0.0, update_s - beside_s) + tiers.handover_s + step_s),),
        weight_gradients_s=compute.weight_gradients_s,
        network_busy_s=moves.gathered_s if strategy.reduces_each else 0.0,
        hides_reduction=stack.overlaps_gradients,
        exposed_share=stack.exposed_gradient_share,
        slowdown=_slowdown(cluster, stack),
    )


def _slowdown(cluster: ClusterSpec, stack: Stack) -> float:
    """Of compute while a collective runs beside it."""
    profile = cluster.device.profile
    return stack.overlap_slowdown or (profile.overlap_slowdown if profile else 1.0)


def _after(phases: Mapping[str, float], forward_s: float, stack: Stack) -> tuple[TimeTerm, ...]:
    """What follows the update; its parameters may be gathered under the first forward."""
    seconds = {phase: phases[phase] for phase in ("count", "router", "norm", "parameters") if phase in phases}
    if stack.overlaps_parameters and "parameters" in seconds:
        seconds["parameters"] = stack.exposed_gradient_share * max(0.0, seconds["parameters"] - forward_s)
    return tuple(TimeTerm(phase, value) for phase, value in seconds.items())


@dataclass(frozen=True, slots=True)
class _Moves:
    """Terms of one micro-batch beside compute and its reductions: gathering, tiers, transfers that block."""

    forward: tuple[TimeTerm, ...]
    backward: tuple[TimeTerm, ...]
    gathered_s: float
    """Of one backward, that the network gathers."""


def _moves(
    setting: Setting,
    strategy: Strategy,
    stage: int,
    compute: Compute,
    phases: Mapping[str, float],
    moved: OffloadForecast | None,
) -> _Moves:
    cluster, m, per_rank = setting.cluster, strategy.micro_batches_per_stage, strategy.stages_per_rank
    num_blocks = len(strategy.stage_layers(setting.model.num_layers)[stage]) + 1
    tiers = tier_seconds(moved, cluster) if moved else TierSeconds()
    gathered_s = phases.get("gather", 0.0) / per_rank
    gathers_s, reads_s = _gathers_s(gathered_s, strategy), _gathers_s(tiers.gathers_s / per_rank, strategy)
    windows = (total_s(compute.forward), total_s(compute.backward))
    fetches = [
        _gathering(gather_s, read_s, compute_s, num_blocks, strategy, _slowdown(cluster, setting.stack))
        for gather_s, read_s, compute_s in zip(gathers_s, reads_s, windows, strict=True)
    ]
    sums_s = tiers.sums_s / (m * per_rank)
    sums = (TimeTerm("offloaded gradients", sums_s),) if strategy.offload.gradients != "none" else ()
    waits = _blocking(setting, strategy, stage)
    away = [_moving(setting, strategy, stage, compute_s) for compute_s in windows]
    return _Moves((*fetches[0], *away[0], *waits), (*fetches[1], *sums, *away[1], *waits), gathers_s[1])


def _moving(setting: Setting, strategy: Strategy, stage: int, compute_s: float) -> tuple[TimeTerm, ...]:
    """What the copies of kept activations add, one way: of the first unit all, of the others what they take longer than
    what runs meanwhile. CPU ranks copy by themselves, and hide nothing."""
    speed = setting.cluster.tier_bytes_per_s("cpu")
    if not strategy.offload.moves_activations or speed is None:
        return ()
    num_units, num_bytes = moved_units(setting.model, setting.job, strategy, stage)
    seconds = num_bytes / speed[0]
    hides = setting.cluster.backend != "gloo" and num_units > 0
    hidden_s = min(seconds, compute_s) * (1 - 1 / num_units) if hides else 0.0
    return (TimeTerm("offloaded activations", seconds - hidden_s),)


def _blocking(setting: Setting, strategy: Strategy, stage: int) -> tuple[TimeTerm, ...]:
    """The transfer that a rank waits for, each way: sending on and receiving the next go together."""
    stack = setting.stack
    if stack.transfers == "beside" or strategy.pp == 1:
        return ()
    crossed_s = transfers_s(setting.model, setting.job, strategy, setting.cluster, stack)
    beside = crossed_s[max(0, stage - 1) : stage + 1]
    return (TimeTerm("transfers", max(beside) + stack.transfer_s),)


def _gathers_s(gather_s: float, strategy: Strategy) -> tuple[float, float]:
    """Seconds of gathering a stage's blocks, per forward and per backward of one micro-batch."""
    if strategy.keeps_gathered:
        return gather_s / strategy.micro_batches_per_stage, 0.0
    each_s = gather_s / (2 * strategy.micro_batches_per_stage)
    return each_s, each_s


def _gathering(
    gather_s: float, read_s: float, compute_s: float, num_blocks: int, strategy: Strategy, slowdown: float
) -> tuple[TimeTerm, ...]:
    """What gathering adds, and reading from a tier before it: all of it, or, where it is done ahead, that of the first
    block and what the others take longer than the blocks that run meanwhile, or slow those down. With shards on a tier,
    of the blocks ahead the last is read and not gathered."""
    ahead = strategy.prefetch - (strategy.offload.parameters != "none")

    def hidden_s(seconds: float) -> float:
        return min(seconds, compute_s) * (1 - 1 / num_blocks)

    beside_s = hidden_s(gather_s) if ahead > 0 else 0.0
    first_s = gather_s / num_blocks if ahead > 0 else gather_s
    gathering = TimeTerm("parameter gathering", max(gather_s - beside_s, first_s + (slowdown - 1) * beside_s))
    if strategy.offload.parameters == "none":
        return (gathering,)
    return gathering, TimeTerm("offloaded parameters", read_s - (hidden_s(read_s) if strategy.prefetch else 0.0))


def optimizer_s(num_parameters: int, job: Job, strategy: Strategy, cluster: ClusterSpec, num_spread: int = 0) -> float:
    """Bytes that one update moves, over the memory bandwidth: gradient read, moments and master read and written,
    parameter written (and read where it is its own master). ZeRO updates this rank's shard: of the `num_spread` of
    experts of a few ranks' own, one among those ranks."""
    recipe = strategy.recipe
    moments = NUM_MOMENTS[job.optimizer]
    master = 2 * recipe.master_bytes if recipe.master else recipe.parameter_bytes
    per_element = recipe.sent_gradient_bytes + 2 * moments * recipe.moment_bytes + master + recipe.parameter_bytes
    num_own = (num_parameters - num_spread) / sharding(strategy).num_shards
    num_own += num_spread / sharding(strategy, True).num_shards if num_spread else 0
    profile = cluster.device.profile
    reached = profile.memory_efficiency / profile.optimizer_passes if profile else 1.0
    return num_own * per_element / (reached * cluster.device.memory_bandwidth_bytes_per_s)
