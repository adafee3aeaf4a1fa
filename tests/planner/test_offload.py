"""Offload in plans: asked for, priced, bounded by what host and disk have, and named where nothing else fits."""

from __future__ import annotations

import pytest

from meshwright.core.errors import RuleError
from meshwright.core.strategy import Offload
from meshwright.core.units import format_bytes
from meshwright.planner.advise import advise
from meshwright.planner.fix import parse_fix
from meshwright.planner.offloads import devices_may_hold, hosts_may_hold
from meshwright.planner.price import price
from meshwright.planner.rank import Options, plan
from tests.shapes import make_model

MODEL = make_model(name="wide", hidden_size=1024, num_layers=4, ffn_size=4096, num_heads=8, head_dim=128)
SMALL = 600 * 10**6
"""Bytes of a device: too few for the model's states, enough without the optimizer's."""


def with_(cluster, **fields):
    return cluster.model_copy(update=fields)


@pytest.fixture
def small(cluster):
    return cluster(1, 1, SMALL)


@pytest.mark.parametrize(
    ("text", "zero"),
    [("optimizer:cpu", 0), ("gradients:disk,path:/scratch", 2), ("optimizer:cpu,parameters:disk,path:/scratch", 3)],
)
def test_asked_for(cluster, job, text, zero):
    """The stage that it needs comes with it, also on one device."""
    for devices in (1, 2):
        found = plan(MODEL, cluster(1, devices), job, parse_fix([f"offload={text}"]))
        assert found.plan.strategy.zero >= zero
        words = dict(part.split(":") for part in text.split(","))
        assert found.plan.strategy.offload == Offload(**words)
        assert (found.forecast.memory.host_bytes > 0) == ("cpu" in text)
        assert (found.forecast.memory.disk_bytes > 0) == ("disk" in text)
    with pytest.raises(RuleError, match="offload to disk without a path"):
        plan(MODEL, cluster(1, 1), job, parse_fix(["offload=optimizer:disk"]))


def test_named_where_nothing_fits(small, job):
    """With what a node needs for it; what it names is then planned."""
    with pytest.raises(RuleError) as caught:
        plan(MODEL, small, job)
    assert "it fits with offload=optimizer:cpu and " in str(caught.value)
    assert "; or it fits on 2 devices instead of 1" in str(caught.value)
    found = plan(MODEL, small, job, parse_fix(["offload=optimizer:cpu"])).forecast
    assert f"{format_bytes(found.memory.host_bytes)} of the host's memory per node" in str(caught.value)


def test_no_more_than_host_and_disk_have(small, job):
    needed = plan(MODEL, small, job, parse_fix(["offload=optimizer:cpu"])).forecast.memory.host_bytes
    assert plan(MODEL, with_(small, host_memory_bytes=needed), job, parse_fix(["offload=optimizer:cpu"]))
    tight = with_(small, host_memory_bytes=needed - 1)
    with pytest.raises(RuleError, match="of the host"):
        plan(MODEL, tight, job, parse_fix(["offload=optimizer:cpu"]))
    with pytest.raises(RuleError, match=r"it fits with offload=optimizer:disk,path:FOLDER and .* of disk per node"):
        plan(MODEL, tight, job)
    with pytest.raises(RuleError, match="of the disk"):
        plan(MODEL, with_(tight, disk_bytes=needed // 2), job, parse_fix(["offload=optimizer:disk,path:/d"]))


def test_cpu_ranks_share_the_memory_that_they_offload_to(cluster, job):
    """Unless more is stated, the host frees them nothing; a disk does."""
    ranks = cluster(1, 1, SMALL, "gloo")
    with pytest.raises(RuleError, match="it fits with offload=optimizer:disk"):
        plan(MODEL, ranks, job, {"precision": "bf16"})
    assert plan(
        MODEL, with_(ranks, host_memory_bytes=10**10), job, parse_fix(["precision=bf16", "offload=optimizer:cpu"])
    )


def test_transfers_take_the_time_that_the_cluster_states(cluster, job):
    """An update of 12 bytes per parameter each way; the longer of it and of the computation."""
    offload = Offload(optimizer="disk", path="/d")
    one = with_(cluster(1, 1), disk_read_bytes_per_s=1e9, disk_write_bytes_per_s=0.5e9)
    chosen = plan(MODEL, one, job, {"offload": offload}).plan.strategy
    unstated, stated = (price(MODEL, c, job, chosen) for c in (cluster(1, 1), one))
    seconds = 12 * MODEL.num_parameters * (1 / 1e9 + 1 / 0.5e9)
    assert stated.step_time.optimizer_s == pytest.approx(seconds, rel=0.01)
    assert unstated.step_time.optimizer_s < seconds / 100
    late = chosen.model_copy(update={"offload": offload.model_copy(update={"delayed": True})})
    beside = price(MODEL, one, job, late).step_time
    handover_s = MODEL.num_parameters * (4 / 0.5e9 + 4 / 1e9)
    update_s = seconds + MODEL.num_parameters * 4 / 1e9
    assert beside.optimizer_s == pytest.approx(handover_s + update_s - beside.pipeline_s, rel=0.01)
    assert "is not timed" in plan(MODEL, cluster(1, 1), job, {"offload": offload}).plan.why
    assert "is not timed" not in plan(MODEL, one, job, {"offload": offload}).plan.why


def test_parameters_and_gradients_are_read_and_written_in_the_step(cluster, job):
    one = with_(cluster(1, 1), host_bandwidth_bytes_per_s=1e9)
    offload = Offload(optimizer="cpu", gradients="cpu", parameters="cpu")
    chosen = plan(MODEL, one, job, {"offload": offload, "zero": 3}).plan.strategy
    fast, slow = (price(MODEL, with_(one, host_bandwidth_bytes_per_s=s), job, chosen) for s in (1e12, 1e9))
    assert slow.step_time.pipeline_s > fast.step_time.pipeline_s


def test_kept_activations_leave_and_take_their_time(cluster, job):
    """A slow host is waited for; a fast one is not."""
    one, offload = cluster(1, 1), {"offload": Offload(activations="cpu"), "micro_batch_size": 1}
    chosen = plan(MODEL, one, job, offload).plan.strategy
    stays = chosen.model_copy(update={"offload": Offload()})
    away, here = (price(MODEL, one, job, strategy) for strategy in (chosen, stays))
    assert away.memory.activations_bytes < here.memory.activations_bytes
    kept = away.memory.host_bytes
    ends = here.memory.activations_bytes - kept
    layer = kept // MODEL.num_layers
    assert 2 * layer <= away.memory.activations_bytes < 2 * layer + ends, "two layers, beside what the embedding keeps"
    fast, slow = (price(MODEL, with_(one, host_bandwidth_bytes_per_s=s), job, chosen) for s in (1e15, 1e6))
    moved_s = 2 * kept * chosen.num_micro_batches / 1e6
    assert slow.step_time.pipeline_s == pytest.approx(moved_s, rel=0.3)
    assert fast.step_time.pipeline_s == pytest.approx(away.step_time.pipeline_s, rel=1e-3)
    assert "is not timed" in plan(MODEL, one, job, offload).plan.why


def test_advice_is_offered(small, job):
    words = dict(advise(MODEL, small, job))
    assert "offload" in words["S2"]
    assert "not offered" not in words["S2"]


def stated(small, **more):
    """A device whose host is known."""
    return with_(small, **{"host_bandwidth_bytes_per_s": 1e10, "host_memory_bytes": 10**10, **more})


def test_searched_as_a_last_resort(small, cluster, job):
    """Where asked for, where nothing fits without, and where room and speed of the host are stated; said in words."""
    may = Options(may_offload=True)
    found = plan(MODEL, stated(small), job, options=may)
    assert found.plan.strategy.offload == Offload(optimizer="cpu")
    assert found.forecast.memory.host_bytes > 0
    assert "Nothing fits without offload: the closest, " in found.plan.why
    assert f"{format_bytes(found.forecast.memory.host_bytes)} of {format_bytes(10**10)}" in found.plan.why
    assert "is not timed" not in found.plan.why
    roomy = plan(MODEL, stated(cluster(1, 1)), job, options=may).plan
    assert not roomy.strategy.offload.is_used
    assert "offload:" not in roomy.why
    for spec, options in ((stated(small), None), (small, may), (stated(small, host_memory_bytes=10**6), may)):
        with pytest.raises(RuleError, match="does not fit"):
            plan(MODEL, spec, job, options=options)


def test_a_last_resort_offloads_no_more_than_it_takes(small, job):
    """Less room on the device than gradients and parameters need: they go too. What is fixed stays."""
    tiny = with_(stated(small), device=small.device.model_copy(update={"memory_bytes": SMALL * 6 // 10}))
    moved = plan(MODEL, tiny, job, options=Options(may_offload=True)).plan.strategy.offload
    assert moved.gradients == "cpu"
    with pytest.raises(RuleError, match="does not fit"):
        plan(MODEL, tiny, job, parse_fix(["offload=optimizer:cpu"]), Options(may_offload=True))


def test_hosts_that_cannot_hold_it_are_not_searched(small, job):
    """A bound: it lets pass what the search finds room for, down to the last byte of the least that the states take."""
    searched = plan(MODEL, stated(small), job, parse_fix(["offload=optimizer:cpu"]))
    offload, least = searched.plan.strategy.offload, searched.forecast.memory.host_bytes
    assert hosts_may_hold(MODEL, stated(small, host_memory_bytes=least), job, {}, offload)
    per_parameter = {"fp32": 2 * 4, "bf16": 3 * 4}  # moments, and masters where there are any
    for precision, num_bytes in per_parameter.items():
        needed = MODEL.num_parameters * num_bytes
        for room, may in ((needed, True), (needed - 1, False)):
            host = stated(small, host_memory_bytes=room)
            assert hosts_may_hold(MODEL, host, job, {"precision": precision}, offload) is may
    assert hosts_may_hold(MODEL, stated(small, host_memory_bytes=1), job, {}, Offload(activations="cpu"))
    assert hosts_may_hold(MODEL, small, job, {}, offload), "where nothing is stated, nothing is ruled out"


@pytest.mark.parametrize(("offload", "per_parameter"), [("none", 2 + 4 + 12), ("optimizer:cpu", 2 + 4)])
def test_devices_that_cannot_hold_what_stays_are_not_searched(small, job, offload, per_parameter):
    fix = parse_fix(["precision=bf16", *([] if offload == "none" else [f"offload={offload}"])])
    needed = MODEL.num_parameters * per_parameter
    for memory_bytes, may in ((-(-needed // small.num_devices), True), (needed // small.num_devices - 1, False)):
        device = small.device.model_copy(update={"memory_bytes": memory_bytes})
        tight = with_(small, device=device, usable_memory_fraction=1.0)
        assert devices_may_hold(MODEL, tight, job, fix) is may


def test_what_devices_may_hold_is_a_bound(small, job):
    """What fits is never ruled out, with just as much memory as it takes."""
    device = small.device
    roomy = with_(small, device=device.model_copy(update={"memory_bytes": 4 * SMALL}))
    least = min(forecast.device_bytes for forecast in plan(MODEL, roomy, job).pareto)
    tight = with_(small, device=device.model_copy(update={"memory_bytes": least}), usable_memory_fraction=1.0)
    assert devices_may_hold(MODEL, tight, job, {})
    assert plan(MODEL, tight, job).forecast.fits
