"""The clock: closed forms on equal stages, hand-worked cases elsewhere."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

import pytest

from meshwright.core.errors import ProgramError
from meshwright.core.program import Action, Kind, Program
from meshwright.core.schedule import schedules
from meshwright.core.strategy import Strategy
from meshwright.schedule import closed_form
from meshwright.schedule.build import order_program, program
from meshwright.schedule.evaluation import evaluation_program
from meshwright.schedule.unit_clock import unit_timeline
from meshwright.sim.clock import UnitCosts, simulate

SCHEDULES = ("naive", "gpipe", "1f1b")


@dataclass(frozen=True)
class StageCosts:
    """Seconds per stage, and per boundary between stages i and i+1."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    transfer_s: Sequence[float]
    reduce_s: Sequence[float] = ()

    def duration_s(self, kind: Kind, stage: int) -> float:
        match kind:
            case Kind.F:
                return self.forward_s[stage]
            case Kind.B:
                return self.backward_s[stage]
            case Kind.SEND_F:
                return self.transfer_s[stage]
            case Kind.SEND_B:
                return self.transfer_s[stage - 1]
            case Kind.REDUCE if self.reduce_s:
                return self.reduce_s[stage]
        return 0


@pytest.mark.parametrize("num_stages", range(1, 9))
@pytest.mark.parametrize("name", SCHEDULES)
def test_clock_equals_closed_form(name: str, num_stages: int) -> None:
    for num_micro_batches in range(1, 25):
        timeline = simulate(program(name, num_stages, num_micro_batches), UnitCosts())
        size = (name, num_stages, num_micro_batches)
        assert timeline.makespan_s == closed_form.makespan_s(*size, 1, 2)
        assert timeline.bubble_fraction == pytest.approx(closed_form.bubble_fraction(*size), abs=1e-12)
        assert timeline.peak_live == closed_form.peak_live(*size)


@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (3, 1), (1, 4), (0.25, 0.5)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_closed_form_holds_for_any_ratio_of_forward_and_backward(name: str, forward: float, backward: float) -> None:
    for num_stages, num_micro_batches in ((2, 1), (3, 7), (4, 4), (5, 3)):
        timeline = simulate(program(name, num_stages, num_micro_batches), UnitCosts(forward, backward))
        expected = closed_form.makespan_s(name, num_stages, num_micro_batches, forward, backward)
        assert timeline.makespan_s == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("num_micro_batches", "bubble"), [(1, 3 / 4), (4, 3 / 7), (8, 3 / 11), (16, 3 / 19)])
def test_bubble_of_four_stages(num_micro_batches: int, bubble: float) -> None:
    for name in ("gpipe", "1f1b"):
        timeline = simulate(program(name, 4, num_micro_batches), UnitCosts())
        assert timeline.bubble_fraction == pytest.approx(bubble, abs=1e-12)
        assert timeline.rank_bubbles == pytest.approx([bubble] * 4, abs=1e-12)


def test_two_clocks_agree() -> None:
    """The textbook clock of `schedule` and this one, with and without transfers in the table."""
    for name, schedule in schedules().items():
        bare = order_program(schedule, schedule.size(4, 6, schedule.chunks or 2))
        assert simulate(bare, UnitCosts()).events == unit_timeline(bare).events
        built = program(name, 4, 6, num_chunks=schedule.chunks or 2)
        assert simulate(built, UnitCosts()).makespan_s == unit_timeline(bare).makespan_s


def test_gpipe_pays_each_boundary_twice() -> None:
    timeline = simulate(program("gpipe", 4, 8), UnitCosts(transfer=0.5))
    assert timeline.makespan_s == (8 + 3) * 3 + 2 * 3 * 0.5


def test_transfers_hide_behind_compute_but_their_latency_does_not() -> None:
    costs = StageCosts(forward_s=(1, 1), backward_s=(2, 2), transfer_s=(0.25,))
    timeline = simulate(program("gpipe", 2, 2), costs)
    spans = {str(event.action): (event.start_s, event.end_s) for row in timeline.events for event in row}
    assert spans["SEND_F0@0"] == (1, 1.25)
    assert spans["F1@0"] == (1, 2)
    assert spans["F0@1"] == (1.25, 2.25)
    assert spans["F1@1"] == (2.25, 3.25)
    assert spans["B0@0"] == (5.5, 7.5)
    assert timeline.busy_s == (6, 6)


def test_stages_of_one_rank_hand_over_at_once() -> None:
    """ZB-V turns round on its last rank: one link each way, none at the fold."""
    timeline = simulate(program("zb-v", 2, 1), UnitCosts(transfer=0.5))
    starts = {str(event.action): event.start_s for row in timeline.events for event in row}
    assert [starts[cell] for cell in ("F0@1", "F0@2", "F0@3", "I0@3")] == [1.5, 2.5, 4, 5]
    assert timeline.makespan_s == 4 + 4 + 4 * 0.5 + 2, "and W of stages 2 and 0, which stand on the way"


def test_boundaries_between_the_same_two_ranks_share_their_link() -> None:
    """Two stages a rank: rank 0 sends activations to stages 1 and 3, over one link."""
    rows = (
        tuple(map(Action.parse, ("F0@0", "SEND_F0@0", "F1@0", "SEND_F1@0", "RECV_F0@2", "F0@2", "SEND_F0@2"))),
        tuple(map(Action.parse, ("RECV_F0@1", "F0@1", "SEND_F0@1", "RECV_F1@1", "F1@1", "RECV_F0@3", "F0@3"))),
    )
    timeline = simulate(Program("shared", rows, (0, 1, 0, 1), 2), UnitCosts(transfer=4))
    ends = {str(event.action): event.end_s for row in timeline.events for event in row}
    assert [ends[cell] for cell in ("SEND_F0@0", "SEND_F1@0", "SEND_F0@1", "SEND_F0@2")] == [5, 9, 10, 15]


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_the_halves_of_a_backward_add_up(share: float) -> None:
    timeline = simulate(program("zb-h1", 3, 5), UnitCosts(1, 4, weight_share=share))
    assert timeline.busy_s == (25, 25, 25)
    spans = {event.action.kind: event.end_s - event.start_s for event in timeline.events[0]}
    assert (spans[Kind.I], spans[Kind.W]) == (4 - 4 * share, 4 * share)


def test_zb_h1_hides_weight_gradients_as_far_as_they_go() -> None:
    """Qi et al. 2024, table 1: (p−1)(F+I−W), here with W shorter than I."""
    timeline = simulate(program("zb-h1", 4, 12), UnitCosts(2, 5, weight_share=0.4))
    assert timeline.makespan_s - timeline.busy_s[0] == pytest.approx(3 * (2 + 3 - 2))


def test_a_slow_boundary_carries_one_transfer_at_a_time() -> None:
    timeline = simulate(evaluation_program(Strategy(pp=2), 4), UnitCosts(forward=1, transfer=3))
    arrivals = [event.end_s for event in timeline.events[0] if event.action.kind is Kind.SEND_F]
    assert arrivals == [4, 7, 10, 13]
    assert timeline.makespan_s == 14


def test_the_slowest_stage_sets_the_pace() -> None:
    costs = StageCosts(forward_s=(1, 3, 1), backward_s=(2, 6, 2), transfer_s=(0, 0))
    gpipe = simulate(program("gpipe", 3, 10), costs)
    one_f_one_b = simulate(program("1f1b", 3, 10), costs)
    assert gpipe.busy_s == one_f_one_b.busy_s == (30, 90, 30)
    assert one_f_one_b.makespan_s == 1 + 90 + 2, "stage 1 starts after one forward of stage 0, then never waits"
    assert gpipe.makespan_s == 1 + 30 + 1 + 2 + 60 + 2, "stage 1 also waits while stage 2 turns round"


def test_reduce_takes_its_time_at_the_end_of_a_row() -> None:
    costs = StageCosts(forward_s=(1, 1), backward_s=(2, 2), transfer_s=(0,), reduce_s=(4, 1))
    timeline = simulate(program("1f1b", 2, 2), costs)
    assert timeline.makespan_s == 9 + 4
    assert timeline.busy_s == (6 + 4, 6 + 1)


def test_simulated_order_is_the_programs_order() -> None:
    built = program("1f1b", 4, 6)
    timeline = simulate(built, UnitCosts(transfer=0.3))
    assert tuple(tuple(event.action for event in row) for row in timeline.events) == built.rows


def test_no_action_starts_before_its_inputs_and_ranks_do_one_thing_at_a_time() -> None:
    costs = StageCosts(forward_s=(1.1, 0.7, 1.3), backward_s=(2.3, 1.9, 2.1), transfer_s=(0.4, 0.2))
    for name in SCHEDULES:
        timeline = simulate(program(name, 3, 5), costs)
        ends = {event.action: event.end_s for row in timeline.events for event in row}
        for row in timeline.events:
            work = [event for event in row if event.action.kind in (Kind.F, Kind.B)]
            assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(work))
            for start, _, action in work:
                forward = action.kind is Kind.F
                source = action.stage - 1 if forward else action.stage + 1
                needed = ends.get(Action(action.kind, source, action.micro_batch))
                boundary = min(source, action.stage)
                assert needed is None or start >= needed + costs.transfer_s[boundary] - 1e-12


def test_a_program_that_hangs_is_reported() -> None:
    rows = ((Action(Kind.RECV_B, 0, 0), Action(Kind.F, 0, 0)), (Action(Kind.SEND_B, 1, 0),))
    stuck = Program("stuck", (rows[0], (Action(Kind.F, 1, 0), *rows[1])), (0, 1), 1)
    with pytest.raises(ProgramError, match="deadlock: rank 1 waits at F0@1"):
        simulate(stuck, UnitCosts())


@pytest.mark.parametrize("backward", [1.0, 1.5, 2.0])
def test_what_is_received_ahead_of_its_use_stops_nobody(backward: float) -> None:
    """Interleaved on 4 ranks, 8 chunks: the bubble of its closed form, 3 parts of 8 · 16, whatever backward takes."""
    timeline = simulate(program("interleaved-1f1b", 4, 16, num_chunks=8), UnitCosts(1, backward))
    assert timeline.makespan_s == pytest.approx((1 + 3 / (8 * 16)) * 8 * 16 * (1 + backward))


@pytest.mark.parametrize("wrong", [-1.0, float("nan")])
def test_a_duration_that_is_none_is_refused(wrong: float) -> None:
    with pytest.raises(ProgramError, match="a duration is 0 or more"):
        simulate(program("gpipe", 2, 2), UnitCosts(forward=wrong))


def calls_per_action(num_stages: int, num_micro_batches: int) -> float:
    """Functions that the clock calls, builtin ones too, for each action of a 1F1B program."""
    built = program("1f1b", num_stages, num_micro_batches)
    num_calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        timeline = simulate(built, UnitCosts())
    finally:
        sys.setprofile(None)
    assert timeline.makespan_s == (num_micro_batches + num_stages - 1) * 3
    return num_calls / sum(map(len, built.rows))


def test_work_for_an_action_is_the_same_however_many_there_are() -> None:
    """Some 2 µs an action: 64 stages take tens of milliseconds."""
    small, large = calls_per_action(8, 16), calls_per_action(64, 128)
    assert large <= 1.05 * small < 8
