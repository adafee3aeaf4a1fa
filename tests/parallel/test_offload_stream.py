"""The streamed and the delayed update: bitwise those of tensors in memory, within the promised working set."""

import random
import threading
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch.optim.adamw import adamw
from torch.profiler import ProfilerActivity, profile

from meshwright.core.errors import InputError
from meshwright.core.flat import Segment, rank_buckets
from meshwright.core.offload import CUT_NUMEL, NUM_WORKING_BUFFERS, Stored, count_groups, cut_groups, working_set_bytes
from meshwright.core.sharding import sharding
from meshwright.core.strategy import Offload, Strategy
from meshwright.cost.offload import offload_forecast
from meshwright.parallel.offload.delayed import DelayedUpdate
from meshwright.parallel.offload.disk import DiskTier
from meshwright.parallel.offload.stream import StoredState, WorkingSet, stream
from meshwright.parallel.offload.tier import Done, HostTier
from meshwright.parallel.states import DTYPES
from tests.models.tiny import SPECS

CPU = torch.device("cpu")


@pytest.fixture
def tiers(tmp_path):
    made = {"cpu": HostTier(CPU), "disk": DiskTier(tmp_path, 0)}
    yield made
    for tier in made.values():
        tier.close()


@dataclass(frozen=True)
class Step:
    """What one update is given besides its gradients."""

    index: int
    learning_rate: float
    divisor: float


def apply_adamw(segments, start, run, gradients, step):
    """`run` from bucket element `start` on: the parts of `segments` that lie in it, in place."""
    numel = gradients.numel()
    for segment in segments:
        low, high = max(segment.start, start) - start, min(segment.stop, start + numel) - start
        if low >= high:
            continue
        part = slice(low, high)
        adamw(
            [run["master"][part]],
            [gradients[part] / step.divisor],
            [run["moment1"][part]],
            [run["moment2"][part]],
            [],
            [torch.tensor(float(step.index))],
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.95,
            lr=step.learning_rate,
            weight_decay=0.1 if segment.decay else 0.0,
            eps=1e-8,
            maximize=False,
        )


def states_kinds(tier, dtype, *more):
    return (*(Stored(kind, tier, dtype, True, True) for kind in ("master", "moment1", "moment2")), *more)


BUCKETS = (
    (Segment(100, 1133, True, True), Segment(1133, 1140, False, True), Segment(1140, 3001, True, False)),
    (Segment(0, 1, False, True),),
    (Segment(7, 998, False, True), Segment(1000, 1777, True, True)),
    (),
)
"""Each begins, ends and is interrupted at odd places."""
RANGES = ((100, 3004), (0, 1), (7, 1780), (0, 0))


def make_states(tiers, kinds, group_numel):
    return [
        StoredState(str(i), kinds, cut_groups(segments, *bounds, group_numel), tiers, DTYPES)
        for i, (segments, bounds) in enumerate(zip(BUCKETS, RANGES, strict=True))
    ]


@pytest.mark.parametrize("group_numel", [64, 200, 1000, 10_000])
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_streamed_update_is_the_one_in_memory(tiers, tier, precision, group_numel):
    dtype = DTYPES[precision]
    states = make_states(tiers, states_kinds(tier, precision), group_numel)
    working = WorkingSet(states, CPU)
    whole = [
        {kind: torch.zeros(stop - start, dtype=dtype) for kind in ("master", "moment1", "moment2")}
        for start, stop in RANGES
    ]
    torch.manual_seed(0)
    for state, tensors in zip(states, whole, strict=True):
        tensors["master"].normal_()
        state.run("master").write(tensors["master"])
    for index in range(4):
        step = Step(index, 1e-2 / (index + 1), 1.0 + index / 3)
        gradients = {state.name: torch.randn(state.stop - state.start, dtype=dtype) for state in states}
        for segments, state, tensors in zip(BUCKETS, states, whole, strict=True):
            apply_adamw(segments, state.start, tensors, gradients[state.name], step)

        def update(state, group, run, gradients=gradients, step=step):
            part = gradients[state.name][group[0] - state.start : group[1] - state.start]
            apply_adamw(BUCKETS[int(state.name)], group[0], run, part, step)

        stream(states, working, update)
    for state, tensors in zip(states, whole, strict=True):
        for kind, expected in tensors.items():
            assert torch.equal(state.run(kind).read(), expected), (state.name, kind)


def test_groups_are_cut_where_kernels_see_no_difference():
    rng = random.Random(0)
    for _ in range(300):
        edges = sorted(rng.sample(range(5000), 8))
        segments = tuple(Segment(a, b, True, True) for a, b in zip(edges[1::2], edges[2::2], strict=False))
        group_numel = rng.randrange(CUT_NUMEL, 900)
        groups = cut_groups(segments, edges[0], edges[-1], group_numel)
        assert [groups[0][0], groups[-1][1]] == [edges[0], edges[-1]]
        assert all(left[1] == right[0] for left, right in pairwise(groups))
        counted = Counter(stop - start for start, stop in groups)
        assert count_groups(segments, edges[0], edges[-1], group_numel) == counted
        assert all(0 < stop - start <= group_numel for start, stop in groups)
        for _, edge in groups[:-1]:
            assert all((edge - s.start) % CUT_NUMEL == 0 for s in segments if s.start < edge < s.stop)
    assert cut_groups((), 5, 5) == ()
    with pytest.raises(InputError, match="groups of 63 elements"):
        cut_groups((), 0, 100, 63)


def peak_allocated_bytes(run):
    """The most that all threads together had allocated through torch at a time, from the start of `run`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    live = peak = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_never_holds_more_than_the_promised_working_set(tiers, tier):
    """By its own count, and by that of torch's allocator, from making the buffers to the end of the update."""
    kinds, bounds = states_kinds(tier, "fp32"), (0, 200_000)
    groups = cut_groups((), *bounds, 4096)
    state = StoredState("0", kinds, groups, tiers, DTYPES)
    promised = working_set_bytes(kinds, 4096)
    assert promised == NUM_WORKING_BUFFERS * 4096 * 12
    assert tiers[tier].held_bytes > 15 * promised
    made = []

    def run():
        made.append(WorkingSet([state], CPU))
        stream([state], made[0], lambda state, group, run: [x.add_(1) for x in run.values()])

    peak = peak_allocated_bytes(run)
    assert made[0].held_bytes == made[0].peak_bytes == promised
    assert made[0].lent_bytes == 0
    assert promised <= peak <= promised + 1024
    assert state.run("moment2").read().eq(1).all()


@pytest.mark.parametrize("tier", ["cpu", "disk"])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16-16"])
@pytest.mark.parametrize("dp", [1, 3])
def test_what_passes_is_the_forecast(tiers, tier, delayed, precision, dp):
    strategy = Strategy(
        dp=dp, zero=3, precision=precision, offload=Offload(optimizer=tier, path="/disk", delayed=delayed)
    )
    spec = next(iter(SPECS.values()))
    buckets = rank_buckets(spec, strategy, {"pp": 0, "dp": dp - 1, "tp": 0})
    forecast = offload_forecast(strategy, "adamw", buckets, {"dp": dp - 1}, group_numel=500)
    way, states = sharding(strategy), []
    for i, bucket in enumerate(buckets):
        own = way.own(bucket.numel, dp - 1)
        groups = cut_groups(bucket.segments(*own), *own, 500)
        states.append(StoredState(str(i), forecast.stored, groups, tiers, DTYPES))
    assert tiers[tier].held_bytes == forecast.tier_bytes[tier]
    working = WorkingSet(states, CPU)
    assert working.held_bytes <= forecast.working_set_bytes
    adopting = [Stored("master", tier, strategy.recipe.master or strategy.recipe.parameter, True, False)]
    for state in states if delayed else ():  # a copy of the gradients
        for start, stop in state.groups:
            x = torch.zeros(stop - start, dtype=state.dtypes["gradients"])
            state.write_start("gradients", start, x).wait()
    stream(states, working, lambda state, group, run: None)
    for state in states if delayed else ():  # the parameters take the masters over
        for start, stop in state.groups:
            state.read_start(adopting[0].kind, start, torch.empty(stop - start, dtype=state.dtypes["master"])).wait()
    assert tiers[tier].take() == forecast.traffic(tier)


def test_twelve_bytes_per_parameter_each_way():
    """Techniques of ZeRO-Infinity: fp32 master and two moments."""
    strategy = Strategy(dp=4, zero=1, precision="bf16", offload=Offload(optimizer="cpu"))
    buckets = rank_buckets(next(iter(SPECS.values())), strategy, {"pp": 0, "dp": 0, "tp": 0})
    taken = offload_forecast(strategy, "adamw", buckets).traffic("cpu")
    padded = sum(bucket.numel for bucket in buckets)
    assert taken.read_bytes == taken.written_bytes == 12 * padded // 4


class RecordingTier(HostTier):
    """Writes down when each transfer starts, and when it was waited for."""

    def __init__(self):
        super().__init__(CPU)
        self.log: list[str] = []

    def _read(self, region, start, out):
        super()._read(region, start, out)
        return self._logged(f"read {region.key.rpartition('/')[2]}")

    def _write(self, region, start, x):
        super()._write(region, start, x)
        return self._logged(f"write {region.key.rpartition('/')[2]}")

    def _logged(self, what):
        log = self.log
        log.append(what)

        class Logged(Done):
            def wait(self):
                log.append(f"end of {what}")

        return Logged()


def test_one_group_comes_and_one_goes_while_one_is_computed():
    tier = RecordingTier()
    kinds = (Stored("master", "cpu", "fp32", True, True),)
    state = StoredState("0", kinds, [(i, i + 1) for i in range(5)], {"cpu": tier}, DTYPES)
    stream([state], WorkingSet([state], CPU), lambda state, group, run: tier.log.append(f"compute {group[0]}"))
    at = {what: place for place, what in enumerate(tier.log)}
    for i in range(5):
        assert at[f"read {i}"] < at[f"end of read {i}"] < at[f"compute {i}"] < at[f"write {i}"]
    for i in range(1, 4):
        assert at[f"read {i + 1}"] < at[f"compute {i}"] < at[f"end of read {i + 1}"], "it comes meanwhile"
        assert at[f"write {i - 1}"] < at[f"compute {i}"] < at[f"end of write {i - 1}"], "it goes meanwhile"
    for i in range(3, 5):
        assert at[f"end of write {i - 3}"] < at[f"read {i}"], "its buffer is free by then"


def test_an_error_of_the_update_leaves_nothing_on_its_way(tiers):
    state = StoredState("0", states_kinds("disk", "fp32"), cut_groups((), 0, 1000, 100), tiers, DTYPES)
    working = WorkingSet([state], CPU)

    def fails(state, group, run):
        if group[0] == 300:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stream([state], working, fails)
    assert working.lent_bytes == 0
    stream([state], working, lambda state, group, run: run["master"].add_(1))
    assert state.run("master").read().eq(1).all()


def test_an_error_of_the_disk_is_the_callers(tiers):
    state = StoredState("0", states_kinds("disk", "fp32"), cut_groups((), 0, 100_000, 1000), tiers, DTYPES)
    working = WorkingSet([state], CPU)

    def cuts(state, group, run):
        if group[0] == 3000:
            with (tiers["disk"].folder / "moment1.bin").open("r+b") as file:
                file.truncate(0)

    with pytest.raises(InputError, match=r"moment1\.bin: the disk tier failed"):
        stream([state], working, cuts)
    assert working.lent_bytes == 0


def test_a_run_on_a_tier_is_cut_like_a_tensor(tiers):
    state = StoredState("0", states_kinds("disk", "fp64"), cut_groups((), 50, 1050, 64), tiers, DTYPES)
    x = torch.randn(1000, dtype=torch.float64)
    run = state.run("moment1")
    run.write(x)
    assert (run.numel(), run.dtype) == (1000, torch.float64)
    for part in (slice(0, 1000), slice(3, 900), slice(63, 65), slice(5, 5), slice(990, 2000)):
        assert torch.equal(run[part].read(), x[part])
    assert torch.equal(run[100:500][50:60].read(), x[150:160])
    run[100:500][50:60].write(torch.zeros(10))
    x[150:160] = 0
    assert torch.equal(run.read(), x)
    with pytest.raises(ValueError, match="leave"):
        state.read_start("moment1", 0, torch.zeros(10, dtype=torch.float64))


class Model:
    """A loss whose gradient depends on the parameters, differently at every step."""

    segments = (Segment(3, 1000, True, True), Segment(1000, 1511, False, True))
    numel = 1520

    def __init__(self):
        torch.manual_seed(0)
        self.inputs = torch.randn(20, self.numel)

    def gradients(self, parameters, index):
        return torch.tanh(parameters * self.inputs[index]) + self.inputs[index] / (index + 1)

    def given(self, gradients, index):
        return Step(index, 1e-2 / (1 + index % 3), max(1.0, float(gradients.norm()) / 30))


def fresh():
    master = torch.linspace(-1, 1, Model.numel)
    return {"master": master, "moment1": torch.zeros(Model.numel), "moment2": torch.zeros(Model.numel)}


def simulate(num_steps, num_synchronous, skipped=()):
    """θ_{i+1} = U(θ_i, g_{i−1}) in plain memory, one thing after the other."""
    model, run = Model(), fresh()
    late = None
    for index in range(num_steps):
        g = model.gradients(run["master"].clone(), index)
        now = None if index in skipped else (g, model.given(g, index))
        is_late = index >= num_synchronous
        for each in (late, None if is_late else now):
            if each is not None:
                apply_adamw(model.segments, 0, run, each[0].clone(), each[1])
        late = now if is_late else None
    return run["master"], late, run


class Delayed:
    """The same by a DelayedUpdate, with masters, moments and gradients on a tier."""

    def __init__(self, tiers, tier, num_synchronous):
        self.model = Model()
        kinds = states_kinds(tier, "fp32", Stored("gradients", tier, "fp32", True, False))
        groups = cut_groups(self.model.segments, 0, self.model.numel, 200)
        self.state = StoredState("0", kinds, groups, tiers, DTYPES)
        for kind, x in fresh().items():
            self.state.run(kind).write(x)
        self.parameters = fresh()["master"]
        self.working = WorkingSet([self.state], CPU)
        self.delayed = DelayedUpdate(self._update, self._adopt, num_synchronous)
        self.may_update = threading.Event()
        self.may_update.set()

    def _update(self, given):
        self.may_update.wait(30)

        def update(state, group, run):
            apply_adamw(self.model.segments, group[0], run, run["gradients"], given)

        stream([self.state], self.working, update)

    def _adopt(self):
        self.parameters.copy_(self.state.run("master").read())

    def step(self, index, skipped=()):
        gradients = self.model.gradients(self.parameters, index)

        def prepare():
            self.state.run("gradients").write(gradients)
            return None if index in skipped else self.model.given(gradients, index)

        self.delayed.step(prepare)


@pytest.mark.parametrize("tier", ["cpu", "disk"])
@pytest.mark.parametrize("num_synchronous", [0, 1, 4, 20])
@pytest.mark.parametrize("skipped", [(), (0, 4, 5, 9)])
def test_delayed_update_is_the_simulated_one(tiers, tier, num_synchronous, skipped):
    run = Delayed(tiers, tier, num_synchronous)
    for index in range(12):
        run.step(index, skipped)
        assert torch.equal(run.parameters, simulate(index + 1, num_synchronous, skipped)[0]), index
    run.delayed.finish()
    _, late, states = simulate(12, num_synchronous, skipped)
    if late is not None:
        apply_adamw(Model.segments, 0, states, late[0].clone(), late[1])
    assert torch.equal(run.parameters, states["master"])
    assert torch.equal(run.state.run("moment2").read(), states["moment2"])
    run.delayed.close()


def test_delay_changes_the_result():
    """Otherwise the comparison above would mean nothing."""
    assert not torch.equal(simulate(6, 0)[0], simulate(6, 20)[0])
    assert not torch.equal(simulate(6, 0)[0], simulate(6, 1)[0])


def test_the_update_runs_beside_the_next_step(tiers):
    run = Delayed(tiers, "cpu", 0)
    run.may_update.clear()
    before = run.parameters.clone()
    run.step(0)  # returns, though its update cannot have begun
    assert run.delayed.is_pending
    gradients = run.model.gradients(run.parameters, 1)
    assert torch.equal(run.parameters, before)
    run.may_update.set()
    run.step(1)
    assert not torch.equal(run.parameters, before)
    assert torch.equal(gradients, run.model.gradients(before, 1))
    run.delayed.close()


@pytest.mark.parametrize("at", [1, 3, 6])
def test_goes_on_from_a_checkpoint_as_if_nothing_had_been(tiers, tmp_path, at):
    """The checkpoint holds the parameters of the next step, and masters and moments that are an update ahead."""
    run = Delayed(tiers, "cpu", 2)
    for index in range(at):
        run.step(index)
    run.delayed.settle()
    saved = {kind: run.state.run(kind).read() for kind in ("master", "moment1", "moment2")}
    parameters, flags = run.parameters.clone(), (run.delayed.num_steps, run.delayed.is_pending)
    run.delayed.close()

    resumed = Delayed({"cpu": HostTier(CPU)}, "cpu", 2)
    for kind, x in saved.items():
        resumed.state.run(kind).write(x)
    resumed.parameters.copy_(parameters)
    resumed.delayed.restore(*flags)
    for index in range(at, 10):
        resumed.step(index)
    assert torch.equal(resumed.parameters, simulate(10, 2)[0])
    resumed.delayed.close()


def test_a_failure_of_the_update_reaches_the_next_step():
    def fails(given):
        raise InputError(f"update {given}")

    delayed = DelayedUpdate(fails, lambda: None, 0)
    delayed.step(lambda: 0)
    with pytest.raises(InputError, match="update 0"):
        delayed.step(lambda: 1)
    delayed.close()


def test_the_update_records_no_gradients():
    enabled = []
    delayed = DelayedUpdate(lambda given: enabled.append(torch.is_grad_enabled()), lambda: None, 0)
    delayed.step(lambda: 0)
    delayed.finish()
    delayed.close()
    assert enabled == [False]


def test_waits_for_no_update_that_never_was():
    delayed = DelayedUpdate(lambda given: None, lambda: pytest.fail("nothing to adopt"), 0)
    delayed.settle()
    delayed.finish()
    delayed.step(lambda: None)
    delayed.close()
    with pytest.raises(InputError, match="-1 synchronous steps"):
        DelayedUpdate(lambda given: None, lambda: None, -1)
