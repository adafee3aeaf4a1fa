"""Forecasts where a rank has several stages, or backward is split: what is live, what is sent, when ranks end."""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest

from meshwright.core.axes import DP, PP, TP, coordinates_of
from meshwright.core.job import Job
from meshwright.core.program import COMPUTE_KINDS, SEND_KINDS, Kind
from meshwright.core.schedule import schedules
from meshwright.core.strategy import Strategy
from meshwright.cost.in_flight import instants
from meshwright.cost.memory import activations_bytes
from meshwright.cost.sending import boundaries_s
from meshwright.cost.step import StageCosts, StepCosts, has_bound, rank_ends_s, step_time
from meshwright.cost.terms import TimeTerm
from meshwright.cost.traffic import hidden_bytes, traffic
from meshwright.schedule.build import build_program
from meshwright.schedule.closed_form import peak_live
from meshwright.sim.clock import simulate
from tests.cost.test_latency import INTER, INTRA, cluster
from tests.shapes import make_model

FURTHER = ("interleaved-1f1b", "bfs", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v")


def split(name: str, pp: int, m: int, **changes: object) -> Strategy:
    """Two stages per rank where the schedule leaves the choice."""
    chunks = 2 if schedules()[name].chunks is None else 1
    return Strategy.model_validate(
        {"pp": pp, "schedule": name, "num_chunks": chunks, "num_micro_batches": m, "precision": "bf16", **changes}
    )


@pytest.mark.parametrize("name", FURTHER)
def test_instants_are_those_of_the_table(name: str) -> None:
    """Whatever a micro-batch keeps on each stage until I, and until W: they hold as much as the fullest action."""
    draw = random.Random(1)
    for p, m in product((2, 4), (4, 8, 12)):
        strategy = split(name, p, m)
        found = instants(strategy, range(p))
        for stages, fullest, row in zip(strategy.stages_by_rank, found, build_program(strategy).rows, strict=True):
            kept = {stage: (draw.random(), draw.random()) for stage in stages}
            held = most = 0.0
            for action in row:
                live, postponed = kept[action.stage]
                change = {Kind.F: live, Kind.B: -live, Kind.I: postponed - live, Kind.W: -postponed}
                held += change.get(action.kind, 0.0)
                most = max(most, held)
            seen = max(
                sum(n * kept[s][0] + k * kept[s][1] for n, k, s in zip(at.live, at.postponed, stages, strict=True))
                for at in fullest
                if at.runs is Kind.F
            )
            assert seen <= most + 1e-9
            in_backward = (at for at in fullest if at.runs is Kind.I)
            later = [
                sum(n * kept[s][0] + k * kept[s][1] for n, k, s in zip(at.live, at.postponed, stages, strict=True))
                + max(0.0, kept[stages[at.stage]][1] - kept[stages[at.stage]][0])
                for at in in_backward
            ]
            assert max([seen, *later]) == pytest.approx(most)


def test_a_split_backward_holds_as_much_until_its_weight_gradients_as_before_its_input_gradients() -> None:
    """ZB-H1 holds on every rank what 1F1B holds on the first, and ZB-H2 nearly twice as much."""
    spec, job = make_model(num_layers=16), Job(seq_length=64, global_batch_size=12)

    def held(name: str) -> list[int]:
        return [activations_bytes(spec, job, split(name, 4, 12), rank) for rank in range(1, 3)]

    assert held("zb-h1")[0] == pytest.approx(held("zb-h1")[1], rel=0.01)
    of_first = 4 / 3 * held("1f1b")[0]  # rank 1 of 1F1B holds p − 1 micro-batches
    assert held("zb-h1")[0] == pytest.approx(of_first, rel=0.05)
    assert held("zb-h2")[0] == pytest.approx(7 / 4 * of_first, rel=0.05)


def test_an_inner_rank_of_several_stages_holds_parts_of_its_layers() -> None:
    spec, job = make_model(num_layers=16), Job(seq_length=64, global_batch_size=12)
    layer = activations_bytes(spec, job, split("1f1b", 4, 12), 1) // 3 // 4
    for name in ("interleaved-1f1b", "bfs"):
        live = peak_live(name, 4, 12, 2)
        assert [activations_bytes(spec, job, split(name, 4, 12), rank) for rank in (1, 2)] == [
            live[rank] * 2 * layer for rank in (1, 2)
        ]


@pytest.mark.parametrize("name", FURTHER)
def test_what_ranks_send_each_other_is_what_the_table_sends(name: str) -> None:
    """Nothing between two stages of one rank; with loops also from the last rank to the first."""
    spec, job = make_model(num_layers=8), Job(seq_length=32, global_batch_size=8)
    for p in (2, 4):
        strategy = split(name, p, 8)
        payload = hidden_bytes(spec, job, strategy)
        for rank, row in enumerate(build_program(strategy).rows):
            sent = traffic(spec, job, strategy, {PP: rank, DP: 0, TP: 0})
            for kind, phase in zip(SEND_KINDS, ("forward", "backward"), strict=True):
                found = sent.rows.get(("send", PP, phase))
                num_sends = sum(action.kind is kind for action in row)
                assert (found.wire_bytes if found else 0) == num_sends * payload


def test_the_ring_of_loops_crosses_nodes_where_its_ranks_do() -> None:
    spec, job, machines = make_model(num_layers=8), Job(seq_length=32, global_batch_size=8), cluster(2, 2)
    seconds = {link.name: link.latency_s for link in (INTRA, INTER)}
    looped = boundaries_s(spec, job, split("bfs", 4, 8), machines)
    assert len(looped) == 7
    assert looped[3] == looped[1] > looped[0] > seconds["inside"]
    assert looped[4:] == looped[:3]
    folded = boundaries_s(spec, job, split("zb-v", 4, 8), machines)
    assert folded == (looped[0], looped[1], looped[0], 0.0, looped[0], looped[1], looped[0])


def priced(strategy: Strategy, draw: random.Random, link_s: float) -> StepCosts:
    """Stages of one size within a third; both copies of a part cost the same."""
    forward = [draw.uniform(0.8, 1.2) for _ in range(strategy.num_parts)] * strategy.pipeline_schedule.num_directions
    ranks = strategy.stage_ranks
    return StepCosts(
        tuple(StageCosts((TimeTerm("f", f),), (TimeTerm("b", 2 * f),), (), 0, (), (), 1, 0.9 * f) for f in forward),
        tuple(link_s * (a != b) for a, b in pairwise(ranks)),
        ranks,
    )


@pytest.mark.parametrize("name", FURTHER)
def test_the_bound_is_a_close_lower_bound_on_the_clock(name: str) -> None:
    """The planner stops simulating once the first in order has been simulated; that is sound only if this holds."""
    draw, ratios = random.Random(0), []
    for p, m, link_s in product((2, 4), (4, 8, 16), (0.0, 0.1)):
        strategy = split(name, p, m)
        costs = priced(strategy, draw, link_s)
        assert has_bound(strategy)
        bound, timeline = rank_ends_s(costs, strategy), simulate(build_program(strategy), costs)
        clock = [max(e.end_s for e in row if e.action.kind in COMPUTE_KINDS) for row in timeline.events]
        assert all(low <= end * (1 + 1e-9) for low, end in zip(bound, clock, strict=True))
        ratios.append(max(bound) / max(clock))
        step = step_time(costs, strategy, clock)
        assert step.bubble_fraction == pytest.approx(timeline.bubble_fraction - _tail(timeline, clock), abs=1e-9)
    assert sum(ratios) / len(ratios) > 0.8


def _tail(timeline, clock) -> float:
    """Of the bubble, what is due to transfers after the last work."""
    busy_s = sum(timeline.busy_s) / len(clock)
    return busy_s / max(clock) - busy_s / timeline.makespan_s


def test_equal_stages_in_loops_take_the_published_closed_form() -> None:
    """Bubble (p−1)/(v·m) of ideal time: Narayanan et al. 2021 (SC21), section 2.2."""
    for p, v in product((2, 4), (2, 3)):
        strategy = Strategy(pp=p, schedule="interleaved-1f1b", num_chunks=v, num_micro_batches=3 * p)
        equal = StageCosts((TimeTerm("f", 1.0),), (TimeTerm("b", 2.0),), (), 0, (), ())
        costs = StepCosts((equal,) * (p * v), (0.0,) * (p * v - 1), strategy.stage_ranks)
        assert max(rank_ends_s(costs, strategy)) == pytest.approx(3 * (3 * p * v + p - 1))
        assert simulate(build_program(strategy), costs).makespan_s == pytest.approx(max(rank_ends_s(costs, strategy)))


def test_split_backwards_add_up() -> None:
    stage = StageCosts((TimeTerm("f", 1.0),), (TimeTerm("b", 2.5),), (), 0, (), (), weight_gradients_s=0.75)
    costs = StepCosts((stage,), ())
    assert [costs.duration_s(kind, 0) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)] == [1.0, 2.5, 1.75, 0.75]


def test_both_ranks_of_a_mirrored_pair_send_and_hold_the_same() -> None:
    spec, job = make_model(num_layers=8, tied_embeddings=True), Job(seq_length=32, global_batch_size=16)
    strategy = split("dualpipe", 4, 8, dp=2, zero=1)
    sent = [traffic(spec, job, strategy, coordinates_of(rank, strategy.sizes)) for rank in (0, 6)]
    assert (
        sent[0].rows[("all_reduce", "pp_mirror", "gradients")] == sent[1].rows[("all_reduce", "pp_mirror", "gradients")]
    )
    assert ("all_reduce", "pp_ends", "gradients") not in sent[0].rows
