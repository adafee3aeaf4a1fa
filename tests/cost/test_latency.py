"""Seconds: collectives against hand-worked values, routes against brute force, the pipeline against the clock."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from meshwright.core.axes import DP, DP_ACROSS, DP_NODE, PP, PP_ENDS, TP, coordinates_of
from meshwright.core.cluster import ClusterSpec, Device, Link
from meshwright.core.errors import InputError
from meshwright.core.job import Job
from meshwright.core.measures import StepTime
from meshwright.core.model import ModelSpec
from meshwright.core.program import COMPUTE_KINDS, Action
from meshwright.core.strategy import Strategy
from meshwright.cost.compute import MESSAGES, flops_per_s
from meshwright.cost.flops import hardware_flops, stage_flops
from meshwright.cost.latency import optimizer_s
from meshwright.cost.network import boundary_link, flat_s, route
from meshwright.cost.step import StageCosts, StepCosts, rank_ends_s, step_terms, step_time
from meshwright.cost.terms import TimeTerm
from meshwright.planner.price import Pricer
from meshwright.schedule.build import program
from meshwright.schedule.closed_form import bubble_fraction, makespan_s
from meshwright.sim.clock import simulate
from tests.shapes import make_model

INTRA = Link(name="inside", bandwidth_bytes_per_s=100e9, latency_s=2e-6)
INTER = Link(name="between", bandwidth_bytes_per_s=10e9, latency_s=10e-6)
FREE = Link(name="free", bandwidth_bytes_per_s=1e30, latency_s=0)


def cluster(num_nodes: int, per_node: int, backend: str = "nccl", **change: object) -> ClusterSpec:
    device = Device(
        name="round",
        memory_bytes=10**11,
        memory_bandwidth_bytes_per_s=1e12,
        peak_flops_per_s={"bf16": 1e15, "fp32": 1e14},
    )
    fields = {
        "name": "test", "num_nodes": num_nodes, "devices_per_node": per_node, "device": device,
        "intra_link": INTRA, "inter_link": INTER, "backend": backend,
    }  # fmt: skip
    return ClusterSpec.model_validate({**fields, **change})


JOB = Job(seq_length=32, global_batch_size=16)


# --- collectives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("primitive", "backend", "size", "rounds", "factor"),
    [
        ("all_reduce", "gloo", 8, 14, 1.75), ("all_reduce", "nccl", 8, 6, 1.75), ("all_reduce", "nccl", 2, 2, 1.0),
        ("all_gather", "gloo", 4, 3, 0.75), ("all_gather", "nccl", 64, 6, 63 / 64),
        ("reduce_scatter", "gloo", 4, 3, 0.75), ("reduce_scatter", "nccl", 64, 6, 63 / 64),
        ("all_to_all", "nccl", 8, 7, 7 / 8), ("broadcast", "nccl", 8, 3, 1.0), ("reduce", "nccl", 8, 3, 1.0),
        ("send", "nccl", 2, 1, 1.0),
        ("all_reduce", "nccl", 1, 0, 0.0), ("send", "gloo", 1, 0, 0.0),
    ],
)  # fmt: skip
def test_a_collective_takes_its_rounds_and_its_bytes(primitive, backend, size, rounds, factor):
    payload = 64 * 10**6
    expected = rounds * INTRA.latency_s + factor * payload / INTRA.bandwidth_bytes_per_s
    assert flat_s(primitive, payload, size, INTRA, backend) == pytest.approx(expected, rel=1e-12)


def test_two_levels_use_every_network_card():
    """4 nodes of 8, hand-worked: 2·7/8·S inside, 2·3/4·S/8 between."""
    over = route(DP, make_model(), Strategy(dp=32), cluster(4, 8))
    payload = 800 * 10**6
    inside = 2 * (3 * 2e-6 + 7 / 8 * payload / 100e9)
    across = 4 * 10e-6 + 2 * 3 / 4 * payload / 8 / 10e9
    assert over.num_local == 8
    assert over.seconds("all_reduce", payload) == pytest.approx(inside + across, rel=1e-12)
    halves = over.seconds("reduce_scatter", payload) + over.seconds("all_gather", payload)
    assert halves == pytest.approx(inside + across, rel=1e-12)


def test_of_an_exchange_only_what_leaves_a_node_passes_the_network():
    """32 ranks on 4 nodes: 3/4 of the bytes. Of 8 copies to nodes at random, 4·(1 − (3/4)^8) / 8 = 45 % are needed."""
    over = route(DP, make_model(), Strategy(dp=32), cluster(4, 8))
    slow = replace(over, inter=over.inter.model_copy(update={"latency_s": 0.0}))
    payload, speed = 10**9, slow.inter.collective_share * slow.inter.bandwidth_bytes_per_s
    assert slow.seconds("all_to_all", payload) == pytest.approx(0.75 * payload / speed)
    share = 4 * (1 - 0.75**8) / 8
    assert slow.exchange_s(payload, 8) == pytest.approx(share * 0.75 * payload / speed)


def test_gloo_goes_round_one_flat_ring():
    over = route(DP, make_model(), Strategy(dp=32), cluster(4, 8, backend="gloo"))
    assert over.seconds("all_reduce", 10**6) == flat_s("all_reduce", 10**6, 32, INTER, "gloo")


# --- which link an axis uses ---------------------------------------------------------------------------------

LAYOUTS = [
    (dp, tp, pp, per_node)
    for dp, tp, pp in product((1, 2, 3, 4, 6), repeat=3)
    for per_node in (1, 2, 3, 4, 6, 8, 12)
    if (dp * tp * pp) % per_node == 0
]


def groups(axis: str, strategy: Strategy) -> list[list[int]]:
    """Global ranks of every group of an axis, from the rank order alone."""
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in range(strategy.world_size):
        at = coordinates_of(rank, strategy.sizes)
        members.setdefault(tuple(v for a, v in at.items() if a != axis), []).append(rank)
    return list(members.values())


@pytest.mark.parametrize("axis", [DP, TP, PP])
def test_an_axis_uses_the_network_where_one_of_its_groups_leaves_a_node(axis):
    for dp, tp, pp, per_node in LAYOUTS:
        strategy = Strategy(dp=dp, tp=tp, pp=pp)
        nodes = [[rank // per_node for rank in group] for group in groups(axis, strategy)]
        over = route(axis, make_model(), strategy, cluster(strategy.world_size // per_node, per_node))
        assert (over.inter is not None) == any(len(set(group)) > 1 for group in nodes), (dp, tp, pp, per_node)
        if over.num_local > 1:
            assert {group.count(node) for group in nodes for node in group} == {over.num_local}


def test_of_two_levels_one_stays_on_the_node_and_one_leaves_it():
    """Also for gloo, which goes in one flat ring otherwise; by hand: 3 nodes of 4, tp 2, so dp 6 = 2 × 3."""
    strategy, machines = Strategy(dp=6, tp=2, ranks_per_node=4), cluster(3, 4, backend="gloo")
    inside, across = (route(axis, make_model(), strategy, machines) for axis in (DP_NODE, DP_ACROSS))
    assert (inside.size, inside.inter) == (2, None)
    assert (across.size, across.inter, across.num_local) == (3, INTER, 1)
    assert across.seconds("all_reduce", 3 * 10**6) == pytest.approx(4 * 10e-6 + 4 * 10**6 / 10e9, rel=1e-12)


def test_the_levels_of_every_layout():
    for dp, tp, pp, per_node in LAYOUTS:
        strategy = Strategy(dp=dp, tp=tp, pp=pp, ranks_per_node=per_node)
        machines = cluster(strategy.world_size // per_node, per_node)
        inside, across = (route(axis, make_model(), strategy, machines) for axis in (DP_NODE, DP_ACROSS))
        assert inside.size * across.size == dp
        if inside.size < dp:
            assert inside.inter is None, (dp, tp, pp, per_node)
            assert across.inter == INTER


def test_the_ends_of_a_pipeline_and_its_boundaries():
    for dp, tp, pp, per_node in LAYOUTS:
        if pp == 1:
            continue
        strategy = Strategy(dp=dp, tp=tp, pp=pp)
        machines = cluster(strategy.world_size // per_node, per_node)
        columns = groups(PP, strategy)
        leaves = any(column[0] // per_node != column[-1] // per_node for column in columns)
        assert (route(PP_ENDS, make_model(), strategy, machines).inter is not None) == leaves
        for stage in range(pp - 1):
            crosses = any(column[stage] // per_node != column[stage + 1] // per_node for column in columns)
            assert boundary_link(stage, stage + 1, strategy, machines) == (INTER if crosses else INTRA)


# --- the pipeline --------------------------------------------------------------------------------------------


def stages(forward_s: list[float], backward_s: list[float], boundaries: list[float]) -> StepCosts:
    pairs = zip(forward_s, backward_s, strict=True)
    built = (StageCosts((TimeTerm("f", f),), (TimeTerm("b", b),), (), 0, (), ()) for f, b in pairs)
    return StepCosts(tuple(built), tuple(boundaries))


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b"])
def test_equal_stages_take_the_published_closed_form(schedule):
    for p, m in product(range(1, 7), (1, 2, 3, 4, 8, 13)):
        costs = stages([1.0] * p, [2.0] * p, [0.0] * (p - 1))
        strategy = Strategy(pp=p, num_micro_batches=m, schedule=schedule)
        ends_s = rank_ends_s(costs, strategy)
        seconds = makespan_s(schedule, p, m, 1, 2)
        assert ends_s == pytest.approx([seconds - 2 * stage for stage in range(p)])
        step = step_time(costs, strategy, ends_s)
        assert step.bubble_fraction == pytest.approx(bubble_fraction(schedule, p, m))
        assert step.total_s == pytest.approx(seconds)


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b"])
def test_the_closed_form_is_a_close_lower_bound_on_the_clock(schedule):
    """The planner stops simulating once the first in order has been simulated; that is sound only if this holds."""
    draw = random.Random(0)
    ratios = []
    for _ in range(60):
        p, m = draw.randint(1, 6), draw.choice((1, 2, 4, 8, 16))
        forward_s = [draw.uniform(0.5, 1.5) for _ in range(p)]
        costs = stages(forward_s, [2 * f for f in forward_s], [draw.choice((0.0, 0.1, 0.4))] * (p - 1))
        strategy = Strategy(pp=p, num_micro_batches=m, schedule=schedule)
        timeline = simulate(program(schedule, p, m), costs)
        clock = [max(e.end_s for e in row if e.action.kind in COMPUTE_KINDS) for row in timeline.events]
        closed = rank_ends_s(costs, strategy)
        assert all(bound <= end * (1 + 1e-9) for bound, end in zip(closed, clock, strict=True))
        ratios.append(closed[0] / clock[0])
    assert min(ratios) > 0.75
    assert sum(ratios) / len(ratios) > 0.94


def test_the_clock_asks_for_the_durations_of_the_table():
    costs = stages([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [0.1, 0.2])
    asked = [costs.duration_s(Action.parse(text).kind, Action.parse(text).stage) for text in
             ("F0@2", "B0@1", "SEND_F0@1", "SEND_B0@1", "SEND_B0@2", "ARM@0", "REDUCE@0")]  # fmt: skip
    assert asked == [3.0, 5.0, 0.2, 0.1, 0.2, 0.0, 0.0]


def test_one_micro_batch_goes_there_and_back():
    costs = stages([1.0, 1.0, 1.0], [2.0, 3.0, 2.0], [0.5, 0.25])
    for schedule in ("naive", "gpipe", "1f1b"):
        ends = rank_ends_s(costs, Strategy(pp=3, schedule=schedule))
        assert ends == pytest.approx([11.5, 9.0, 5.75])


# --- data-parallel communication and overlap -----------------------------------------------------------------


def reducing(seconds: float, num_reductions: int, backward_s: float) -> StageCosts:
    return StageCosts((), (TimeTerm("b", backward_s),), (TimeTerm("gradients", seconds),), num_reductions, (), ())


def test_backward_hides_all_but_the_last_bucket():
    assert reducing(0.0, 0, 1.0).exposed_reduction_s == 0
    assert reducing(3.0, 1, 5.0).exposed_reduction_s == 3.0
    assert reducing(4.0, 4, 100.0).exposed_reduction_s == 1.0
    assert reducing(40.0, 4, 8.0).exposed_reduction_s == 40 - 0.75 * 8


def test_a_later_stage_reduces_while_earlier_ones_still_run_backward():
    strategy = Strategy(pp=2, dp=2, num_micro_batches=1)
    late = StepCosts((reducing(0.0, 0, 5.0), reducing(4.0, 1, 5.0)), (0.0,))
    assert step_time(late, strategy, [10.0, 5.0]).data_comm_exposed_s == 0
    longer = StepCosts((reducing(0.0, 0, 5.0), reducing(7.0, 1, 5.0)), (0.0,))
    assert step_time(longer, strategy, [10.0, 5.0]).data_comm_exposed_s == pytest.approx(2.0)


# --- a step --------------------------------------------------------------------------------------------------


def costs_of(strategy: Strategy, machines: ClusterSpec, spec: ModelSpec | None = None) -> StepCosts:
    return Pricer(spec or make_model(), machines, JOB).step_costs(strategy)


def time_of(strategy: Strategy, machines: ClusterSpec) -> StepTime:
    costs = costs_of(strategy, machines)
    return step_time(costs, strategy, rank_ends_s(costs, strategy))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_device_takes_its_flops_over_its_speed(recompute):
    machines = cluster(1, 1)
    strategy = Strategy(num_micro_batches=16, precision="bf16", recompute=recompute)
    step = time_of(strategy, machines)
    assert step.pipeline_s == pytest.approx(hardware_flops(make_model(), JOB, recompute, causal=True) / 0.5e15)
    assert step.data_comm_exposed_s == 0
    assert step.bubble_fraction == pytest.approx(0)
    assert step.optimizer_s == pytest.approx(30 * make_model().num_parameters / 1e12)


def test_free_links_leave_only_the_flops_and_the_head_s_imbalance():
    machines = cluster(2, 4, intra_link=FREE, inter_link=FREE)
    strategy = Strategy(dp=2, tp=2, pp=2, num_micro_batches=8, precision="bf16")
    costs = costs_of(strategy, machines)
    assert costs.boundaries_s[0] < 1e-20
    assert step_time(costs, strategy, [1.0, 0.5]).data_comm_exposed_s < 1e-15
    first, last = costs.stages
    assert first.forward_s + (last.forward_s - first.forward_s) == pytest.approx(last.forward_s)
    assert last.forward_s > first.forward_s
    assert first.backward_s == pytest.approx(2 * first.forward_s)


SENT = [("ring", 1e15), ("ring", 1e6), ("ring-self-attention", 1e6), ("ulysses", 1e6)]


@pytest.mark.parametrize(("kind", "bandwidth"), SENT)
def test_messages_of_attention_hide_under_its_blocks(kind: str, bandwidth: float) -> None:
    """On a fast link all but the gradients going home; on a slow one what blocks take; nothing of Ulysses."""
    size, element, sums = 4, 2, 4
    strategy = Strategy(context={"kind": kind, "degree": size}, precision="bf16")
    machines = cluster(1, size)
    link = machines.intra_link.model_copy(update={"bandwidth_bytes_per_s": bandwidth, "latency_s": 0.0})
    machines = machines.model_copy(update={"intra_link": link})
    (stage,) = costs_of(strategy, machines).stages
    (waiting,) = costs_of(strategy, machines.model_copy(update={"backend": "gloo"})).stages
    seen, sent = (
        [{t.name: t.seconds for t in terms}[MESSAGES] for terms in (of.forward, of.backward)] for of in (stage, waiting)
    )
    flops = stage_flops(make_model(), JOB, strategy, 0)
    block_s = [times * flops.scores / flops_per_s(machines, strategy) * (size - 1) / size for times in (1, 2)]
    home_s = [0.0, sent[1] * sums / ((size - 1) * element + size * sums) * (kind == "ring")]
    for found, whole, hiding, home in zip(seen, sent, block_s, home_s, strict=True):
        assert whole > 0
        if kind == "ulysses":
            assert found == whole
        elif bandwidth == 1e15:
            assert found == pytest.approx(home)
        else:
            assert found == pytest.approx(whole - hiding)
            assert found < whole


def test_tensor_parallel_reductions_are_those_of_the_traffic():
    machines = cluster(1, 2)
    strategy = Strategy(tp=2, num_micro_batches=16, precision="bf16")
    hidden = 32 * 64 * 2
    one = 2 * 2e-6 + hidden / 100e9
    loss = 4 * 2e-6 + 3 * 32 * 4 / 100e9
    (stage,) = costs_of(strategy, machines).stages
    assert {t.name: t.seconds for t in stage.forward}["tensor-parallel reductions"] == pytest.approx(17 * one + loss)
    assert {t.name: t.seconds for t in stage.backward}["tensor-parallel reductions"] == pytest.approx(17 * one)
    again = costs_of(strategy.model_copy(update={"recompute": "full"}), machines).stages[0]
    layers = {t.name: t.seconds for t in stage.forward}["layers"]
    assert again.backward_s - stage.backward_s == pytest.approx(layers + 16 * one)


@pytest.mark.parametrize(
    ("precision", "optimizer", "per_element"),
    [("fp32", "adamw", 28), ("bf16", "adamw", 30), ("bf16-16", "adamw", 28), ("fp32", "sgd", 12), ("bf16", "sgd", 14)],
)
def test_the_optimizer_moves_its_bytes_once(precision, optimizer, per_element):
    job = Job(seq_length=32, global_batch_size=16, optimizer=optimizer)
    plain = Strategy(dp=4, precision=precision)
    assert optimizer_s(10**9, job, plain, cluster(1, 4)) == pytest.approx(per_element * 1e9 / 1e12)
    sharded = plain.model_copy(update={"zero": 1})
    assert optimizer_s(10**9, job, sharded, cluster(1, 4)) == pytest.approx(per_element * 1e9 / 4 / 1e12)


def test_experts_of_few_ranks_own_are_updated_by_those():
    """4 ranks, experts over 2 of them: each expert has 2 replicas, and an update of ZeRO-1 is cut in 2, not in 4."""
    job, machines = Job(seq_length=32, global_batch_size=16), cluster(1, 4)
    strategy = Strategy.model_validate({"dp": 4, "expert": {"degree": 2}})
    whole_s = optimizer_s(10**9, job, strategy, machines, num_spread=6 * 10**8)
    assert whole_s == pytest.approx(28e9 / 1e12), "without ZeRO each rank updates all that it has"
    sharded = strategy.model_copy(update={"zero": 1})
    assert optimizer_s(10**9, job, sharded, machines, 6 * 10**8) == pytest.approx(whole_s * (0.4 / 4 + 0.6 / 2))


def test_zero_gathers_in_the_open_what_it_does_not_reduce():
    """ZeRO-1 reduces half as much behind backward and gathers the rest after the optimizer."""
    plain = costs_of(Strategy(dp=4, num_micro_batches=4), cluster(1, 4)).stages[0]
    sharded = costs_of(Strategy(dp=4, num_micro_batches=4, zero=1), cluster(1, 4)).stages[0]
    assert sum(t.seconds for t in sharded.reduction) == pytest.approx(sum(t.seconds for t in plain.reduction) / 2)
    assert {t.name for t in sharded.after} - {t.name for t in plain.after} == {"parameters"}


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b"])
def test_terms_add_up_to_the_step(schedule):
    strategy = Strategy(
        dp=2, tp=2, pp=4, zero=1, num_micro_batches=8, recompute="full", precision="bf16", schedule=schedule
    )
    machines = cluster(4, 4)
    costs = costs_of(strategy, machines)
    time = step_time(costs, strategy, rank_ends_s(costs, strategy))
    terms = step_terms(costs, strategy, time)
    assert sum(term.seconds for term in terms) == pytest.approx(time.total_s)
    assert min(term.seconds for term in terms) >= 0
    assert len({term.name for term in terms}) == len(terms)


def test_a_dtype_that_the_device_lacks_is_an_error_not_a_guess():
    with pytest.raises(InputError, match="states no peak FLOP/s for fp64; it has bf16, fp32"):
        costs_of(Strategy(precision="fp64"), cluster(1, 1))
