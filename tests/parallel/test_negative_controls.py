"""What parity must notice: with any one reduction left out, or one factor wrong, it names what then differs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from meshwright.comm.collectives import all_reduce
from meshwright.core.axes import TP_COL, TP_ROW
from meshwright.core.model import ModelSpec
from meshwright.core.placement import Placement
from meshwright.core.plan import Plan
from meshwright.core.program import Action
from meshwright.parallel.apply import ParallelModel
from meshwright.parallel.census import ActivationCensus
from meshwright.parallel.data import GradientReducer
from meshwright.parallel.pipeline import StageRunner
from meshwright.parallel.routers import CutSequences
from meshwright.parallel.states import FlatStates
from meshwright.run.engine import make_mesh
from meshwright.run.parity import Mismatch, find_mismatch
from meshwright.train.optimizer import FlatOptimizer, Shard
from tests.parallel.layouts import gpt2, latent, llama, make_plan, mixture, qwen3
from tests.parallel.mutations import Mutation, counted_again, every, replaced, tokens_times, without
from tests.parallel.runs import SHORT_PARITY
from tests.pool import RanksFailed

LLAMA = llama(num_layers=2)
QWEN3 = qwen3(num_layers=2)
QWEN3_1 = qwen3(num_layers=1)
GPT2 = gpt2(num_layers=2)
LATENT = latent(num_layers=1)
MOE = mixture(num_layers=1, dense_layers=None)
BATCH = mixture({"balance_over": "batch"}, num_layers=1, dense_layers=None)

BACKWARD = 1 + 2 * LLAMA.num_layers
"""All-reduces over tp in a micro-batch's backward: head, then of each layer, from the last, mlp and attention."""
FORWARD = BACKWARD + 2
"""In its forward: embedding, then attention and mlp of each layer, then the loss's maximum and its sum."""


SP2 = {"tp": 2, "sequence": "megatron"}
CP2 = {"context": {"degree": 2}}
T2 = {"tp": 2}


@dataclass(frozen=True)
class Control:
    """A fault, a layout that needs what it breaks, and what parity has to say."""

    mutation: Mutation
    model: ModelSpec
    strategy: dict[str, Any]
    what: str
    """The first that differs; over ranks, where some see it only in what follows from it."""
    where: str = ""
    """Pattern of the first place that differs."""
    ratio: float | None = None
    """Of ours to one process, on some rank, where the fault is a constant factor."""
    plan: Plan = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", make_plan(self.model, **self.strategy))


def _is_kv(placement: Placement) -> bool:
    return ".attention.k." in placement.name or ".attention.v." in placement.name


def _no_forward_sum(at: int) -> Mutation:
    return without("tp", "all_reduce", "forward", every(FORWARD, at))


def _no_backward_sum(at: int) -> Mutation:
    return without("tp", "all_reduce", "backward", every(BACKWARD, at))


def _sp(primitive: str, phase: str, period: int, at: int, model: ModelSpec = LLAMA) -> Control:
    """Megatron sequence parallelism without one call of every `period`."""
    mutation = without("tp", primitive, phase, every(period, at))
    return Control(mutation, model, {**T2, "sequence": "megatron", "micro_batch_size": 2}, "gradient")


def _counts_twice(right: Callable[..., Any]) -> Callable[..., Any]:
    def count(self: ParallelModel, batches: Any) -> torch.Tensor:
        with self.mesh.ledger.phase("count"):
            all_reduce(torch.zeros(2, dtype=torch.float64), self.mesh["dp"])
        return right(self, batches)

    return count


def _unclipped(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, norm: torch.ones_like(norm)


def _doubled(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, loss: tuple(2 * value for value in right(self, loss))


def _half_the_sequences(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, batches: right(self, batches) * torch.tensor([1, 1, 1, 0.5], dtype=torch.float64)


def _its_own(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, x: x


def _keeps_twice(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self: [*right(self), *right(self)]


def _forgets_the_last(right: Callable[..., Any]) -> Callable[..., Any]:
    def weight_gradients(self: StageRunner, step: Any, action: Action) -> None:
        if action.micro_batch == len(step.micro_batches) - 1:
            step.products[action.stage, action.micro_batch].clear()
        right(self, step, action)

    return weight_gradients


def _only_the_last_stage(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, stages: right(self, {max(stages)})


def _does_not_see_products(right: Callable[..., Any]) -> Callable[..., Any]:
    def enter(self: ActivationCensus) -> ActivationCensus:
        right(self)
        for keeper in self._keepers:
            keeper.keep = lambda tensor: None
        return self

    return enter


D2, T4, P2 = {"dp": 2}, {"tp": 4}, {"pp": 2, "num_micro_batches": 2}
SQUARE = {"tp": 4, "tensor": {"kind": "2d"}, "micro_batch_size": 2}
ROW_SUMS = 2 * LLAMA.num_layers + 3
"""Forward all-reduces over a row: of each norm, the loss's maximum and its sum."""

CONTROLS = {
    # Data parallelism.
    "dp sum of gradients": Control(without("dp", "all_reduce", "gradients"), LLAMA, D2, "gradient norm", ratio=0.0),
    "dp sum of gradients, zero 1": Control(
        without("dp", "reduce_scatter", "gradients"), LLAMA, {**D2, "zero": 1}, "gradient norm", ratio=0.0
    ),
    "sum of gradients over dp and cp": Control(
        without("dp_cp", "all_reduce", "gradients"), LLAMA, {"context": {"degree": 2}}, "gradient"
    ),
    "sum of gradients over dp and cp, zero 2": Control(
        without("dp_cp", "reduce_scatter", "gradients"), LLAMA, {"context": {"degree": 2}, "zero": 2}, "gradient"
    ),
    "gather of parameters": Control(without("dp", "all_gather", "parameters"), LLAMA, {**D2, "zero": 1}, "weight"),
    "count of tokens": Control(without("dp", "all_reduce", "count"), LLAMA, {**D2, "num_micro_batches": 2}, "gradient"),
    # Gradients that are partial over other axes.
    "sum over key/value replicas": Control(
        without("tp_kv", "all_reduce", "gradients"), LLAMA, T4, "gradient", r"layers.0.attention.k.weight"
    ),
    "sum over replicas of one key/value head": Control(
        without("tp_kv", "all_reduce", "gradients"), QWEN3, T2, "gradient", r"layers.0.attention.k.weight"
    ),
    "tp sum of q and k norms": Control(
        without("tp", "all_reduce", "gradients"), QWEN3, T2, "gradient", r"layers.0.attention.[qk]_norm.weight"
    ),
    "sum of tied embeddings": Control(
        without("pp_ends", "all_reduce", "gradients"), QWEN3, P2, "gradient", r"embedding.weight"
    ),
    # Routers.
    "loads of all ranks": Control(without("dp", "all_reduce", "router"), BATCH, D2, "gradient"),
    "adjoint of the weights of choices": Control(
        without("tp", "all_reduce", "backward", every(3, 1)), MOE, T2, "gradient", r"router.weight|embedding"
    ),
    "sum behind experts": Control(without("tp", "all_reduce", "forward", every(5, 2)), MOE, T2, "gradient"),
    "a router's loss twice": Control(
        replaced(ParallelModel, "count_step", _half_the_sequences), MOE, D2, "gradient", r"router.weight|embedding"
    ),
    "experts summed over edp": Control(
        without("edp", "all_reduce", "gradients"), MOE, {"dp": 4, "expert": {"degree": 2}}, "gradient"
    ),
    "experts' norm once for all ranks": Control(
        counted_again(lambda p: not p.is_spread), MOE, {**T2, "dp": 2, "expert": {"degree": 2}}, "norm"
    ),
    "loads of one share": Control(without("tp", "all_reduce", "router"), MOE, SP2, "router-loss"),
    "shares of one part of a sequence": Control(
        replaced(CutSequences, "sum", _its_own), MOE, CP2, "gradient", r"router.weight|embedding"
    ),
    "adjoint of the weights of all shares": Control(
        without("tp", "reduce_scatter", "backward", every(4, 1)), MOE, SP2, "gradient", r"router.weight|embedding"
    ),
    "loads of one rank": Control(without("dp", "all_reduce", "router"), MOE, D2, "router-loss"),
    # Latents: head, mlp, then three of attention's one layer.
    **{
        f"sum {at} of latents' gradients": Control(
            without("tp", "all_reduce", "backward", every(5, at)), LATENT, T2, "gradient", r"latents|embedding"
        )
        for at in (2, 3, 4)
    },
    # Stages of a pipeline.
    "weight gradients of the last micro-batch": Control(
        replaced(StageRunner, "_weight_gradients", _forgets_the_last), LLAMA, {**P2, "schedule": "zb-h1"}, "gradient"
    ),
    "buckets that go with the backward of one stage": Control(
        replaced(GradientReducer, "_expect", _only_the_last_stage),
        LLAMA,
        {**D2, "schedule": "zb-v", "bucket_bytes": 25 * 2**20},
        "gradient norm",
    ),
    "sum over both copies of a stage": Control(
        without("pp_mirror", "all_reduce", "gradients"), LLAMA, {**P2, "schedule": "dualpipe"}, "gradient"
    ),
    "norm with both copies of a stage": Control(
        counted_again(lambda p: True), LLAMA, {**P2, "schedule": "dualpipe"}, "norm"
    ),
    "what waits for weight gradients is not counted": Control(
        replaced(ActivationCensus, "__enter__", _does_not_see_products),
        LLAMA,
        {**P2, "schedule": "zb-h1"},
        "memory",
        r"activations",
    ),
    # Adjoints inside layers. What lies in front of the fault differs, what lies behind it does not.
    "adjoint at the head": Control(_no_backward_sum(0), LLAMA, T2, "gradient", r"embedding.weight"),
    "adjoint at the last mlp": Control(_no_backward_sum(1), LLAMA, T2, "gradient", r"embedding.weight"),
    "adjoint at the last attention": Control(_no_backward_sum(2), LLAMA, T2, "gradient", r"embedding.weight"),
    "adjoint at the first attention": Control(
        _no_backward_sum(BACKWARD - 1), LLAMA, T2, "gradient", r"embedding.weight"
    ),
    # Sums of the forward pass.
    "sum of the embedding": Control(_no_forward_sum(0), LLAMA, T2, "gradient"),
    "sum behind attention": Control(_no_forward_sum(1), LLAMA, T2, "gradient"),
    "sum behind mlp": Control(_no_forward_sum(2), GPT2, T2, "gradient"),
    "maximum of logits": Control(_no_forward_sum(-2), LLAMA, T2, "gradient"),
    "sum of exponentials": Control(_no_forward_sum(-1), LLAMA, T2, "gradient"),
    "sum in recomputation": Control(
        without("tp", "all_reduce", "recompute"), LLAMA, {**T2, "recompute": "full"}, "gradient"
    ),
    # Sequence parallelism: of two layers the order is head, mlp, attention, mlp, attention, embedding backward.
    "sum of norm gradients over tokens": Control(
        without("tp", "all_reduce", "gradients"),
        GPT2,
        {**T2, "sequence": "megatron"},
        "gradient",
        r"layers.0.attention_norm.weight|positions.weight",
    ),
    "sum of the embedding's tokens": _sp("reduce_scatter", "forward", BACKWARD, 0),
    "sum of attention's tokens": _sp("reduce_scatter", "forward", BACKWARD, 1),
    "sum of the mlp's tokens": _sp("reduce_scatter", "forward", BACKWARD, 2, GPT2),
    "gather before attention": _sp("all_gather", "forward", BACKWARD, 0),
    "gather before the mlp": _sp("all_gather", "forward", BACKWARD, 1),
    "gather before the head": _sp("all_gather", "forward", BACKWARD, -1),
    "adjoint of the gather before the head": _sp("reduce_scatter", "backward", BACKWARD, 0),
    "adjoint of the gather before the mlp": _sp("reduce_scatter", "backward", BACKWARD, 1),
    "adjoint of the gather before attention": _sp("reduce_scatter", "backward", BACKWARD, 2),
    "gather of the head's input again": _sp("all_gather", "backward", 2 * BACKWARD, 0),
    "adjoint of the mlp's sum": _sp("all_gather", "backward", 2 * BACKWARD, 1),
    "gather of the mlp's input again": _sp("all_gather", "backward", 2 * BACKWARD, 2),
    "adjoint of attention's sum": _sp("all_gather", "backward", 2 * BACKWARD, 3),
    "gather of attention's input again": _sp("all_gather", "backward", 2 * BACKWARD, 4),
    "adjoint of the embedding's sum": _sp("all_gather", "backward", 2 * BACKWARD, -1),
    "gather in recomputation": Control(
        without("tp", "all_gather", "recompute"), LLAMA, {**T2, "sequence": "megatron", "recompute": "full"}, "gradient"
    ),
    # Grids of tensor parallelism; each call by itself: `test_every_call`.
    "sum over replicas of key/value heads on a grid": Control(
        without("tp_kv", "all_reduce", "gradients"), QWEN3_1, SQUARE, "gradient", r"layers.0.attention.[kv].weight"
    ),
    "sum of vectors over the columns of 2D": Control(
        without(TP_COL, "all_reduce", "gradients"), GPT2, SQUARE, "gradient", r"positions|norm|bias"
    ),
    "statistics of a norm over a row": Control(
        without(TP_ROW, "all_reduce", "forward", every(ROW_SUMS, 0)), LLAMA, SQUARE, "gradient"
    ),
    # Scales.
    "gradients times micro-batches": Control(
        tokens_times(1 / 3), LLAMA, {"pp": 2, "num_micro_batches": 3}, "gradient", ratio=3.0
    ),
    "mean over dp instead of sum": Control(tokens_times(2), LLAMA, {**D2, "zero": 1}, "gradient", ratio=0.5),
    # The norm.
    "norm over all ranks": Control(without("world", "all_reduce", "norm"), LLAMA, P2, "loss norm"),
    "norm with both tied copies": Control(counted_again(lambda p: p.name == "embedding.weight"), QWEN3, P2, "norm"),
    "norm with every key/value replica": Control(counted_again(_is_kv), QWEN3, T2, "norm"),
    "norm with every replica": Control(counted_again(lambda p: True), LLAMA, T2, "norm"),
    "loss of two ranks counted": Control(
        replaced(FlatOptimizer, "norm_and_loss", _doubled),
        LLAMA,
        D2,
        "loss",
        ratio=2.0,
    ),
    # The update.
    "no clipping": Control(replaced(FlatOptimizer, "_divisor", _unclipped), LLAMA, D2, "weight", r"adamw"),
    "decay of vectors": Control(
        replaced(Placement, "decay", lambda right: property(lambda self: True)),
        LLAMA,
        D2,
        "weight",
        r"norm.weight` \(adamw step 0",
    ),
    # What is sent and held.
    "a call too many": Control(
        replaced(ParallelModel, "count_step", _counts_twice), LLAMA, D2, "traffic", r"all_reduce dp count", ratio=2.0
    ),
    "a state kept twice": Control(
        replaced(Shard, "states", _keeps_twice), LLAMA, D2, "memory", r"optimizer \(adamw", ratio=2.0
    ),
}


def mismatch_on_rank(rank: int, world: int, name: str | None, plan: str) -> Mismatch | None:
    """What parity says on this rank under the control's mutation; None stands for a run as it is."""
    parsed = Plan.from_toml(plan)
    mesh = make_mesh(parsed)
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            CONTROLS[name].mutation(patch, mesh)
        return find_mismatch(parsed, mesh, num_steps=SHORT_PARITY)


@pytest.mark.parametrize("name", CONTROLS)
def test_parity_names_the_fault(ranks: Callable[..., list[Mismatch | None]], name: str) -> None:
    control = CONTROLS[name]
    found = ranks(mismatch_on_rank, control.plan.strategy.world_size, name, control.plan.to_toml(), timeout_s=120)
    seen = [mismatch for mismatch in found if mismatch is not None]
    assert seen, "nothing was noticed"
    assert {mismatch.what for mismatch in seen} == set(control.what.split()), "\n".join(map(str, seen))
    assert any(re.search(control.where, mismatch.where) for mismatch in seen), "\n".join(map(str, seen))
    if control.ratio is not None:
        ratios = [mismatch.ratio for mismatch in seen if mismatch.ratio is not None]
        assert any(ratio == pytest.approx(control.ratio, abs=1e-9) for ratio in ratios), "\n".join(map(str, seen))


def test_the_same_layouts_pass_as_they_are(ranks: Callable[..., list[Mismatch | None]]) -> None:
    """Without a mutation none of these plans differs, so that what the controls show is the mutation's."""
    for plan in dict.fromkeys(control.plan.to_toml() for control in CONTROLS.values()):
        world = Plan.from_toml(plan).strategy.world_size
        assert ranks(mismatch_on_rank, world, None, plan, timeout_s=120) == [None] * world


def reduced_in_part(rank: int, world: int, plan: str) -> None:
    """Two steps in which the second stage of a rank is never reduced."""
    parsed = Plan.from_toml(plan)
    with pytest.MonkeyPatch.context() as patch:
        right = GradientReducer.finish
        patch.setattr(GradientReducer, "finish", lambda self, stage: right(self, stage) if stage == 0 else None)
        find_mismatch(parsed, make_mesh(parsed))


def test_a_stage_that_is_never_reduced_is_noticed(ranks: Callable[..., list[None]]) -> None:
    with pytest.raises(RanksFailed, match="after it was reduced"):
        ranks(reduced_in_part, 2, make_plan(LLAMA, dp=2, schedule="zb-v").to_toml(), timeout_s=60)


def seen_by_one(rank: int, world: int, plan: str) -> Mismatch | None:
    """What parity says where only rank 1 holds a byte too many."""
    parsed = Plan.from_toml(plan)
    with pytest.MonkeyPatch.context() as patch:
        right = FlatStates.parameter_bytes.fget
        patch.setattr(FlatStates, "parameter_bytes", property(lambda self: right(self) + rank))
        return find_mismatch(parsed, make_mesh(parsed))


def test_a_mismatch_of_one_rank_leaves_no_other_waiting(ranks: Callable[..., list[Mismatch | None]]) -> None:
    first, second = ranks(seen_by_one, 2, make_plan(LLAMA, pp=2).to_toml(), timeout_s=60)
    assert first is None
    assert (second.what, second.where.split()[0]) == ("memory", "parameters")
