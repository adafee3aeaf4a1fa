"""The forecast of offload: which kinds go where, and what they cost; tests/parallel compares it with a count."""

import pytest

from meshwright.core.errors import InputError
from meshwright.core.flat import Bucket
from meshwright.core.offload import BLOCK_BYTES, stored_kinds
from meshwright.core.precision import RECIPES
from meshwright.core.strategy import Offload, Strategy
from meshwright.cost.offload import offload_forecast, streamed_s, transfer_s

BUCKETS = (Bucket((), 1200, ()), Bucket((), 8, ()))


def kinds(precision, **offload):
    return {s.kind: (s.tier, s.dtype) for s in stored_kinds(RECIPES[precision], "adamw", Offload(**offload))}


def test_what_is_stored():
    assert kinds("fp32") == {}
    assert kinds("fp32", optimizer="cpu") == {"moment1": ("cpu", "fp32"), "moment2": ("cpu", "fp32")}
    assert kinds("bf16", optimizer="disk").keys() == {"master", "moment1", "moment2"}
    assert kinds("bf16-16", gradients="cpu", parameters="disk") == {
        "gradients": ("cpu", "bf16"),
        "parameters": ("disk", "bf16"),
    }


def test_sgd_keeps_masters_only():
    assert [s.kind for s in stored_kinds(RECIPES["bf16"], "sgd", Offload(optimizer="cpu"))] == ["master"]
    assert stored_kinds(RECIPES["fp32"], "sgd", Offload(optimizer="cpu")) == ()


def test_delayed_updates_have_copies_of_their_own():
    found = kinds("fp32", optimizer="cpu", delayed=True)
    assert found.keys() == {"master", "moment1", "moment2", "gradients"}
    assert kinds("bf16-16", optimizer="disk", gradients="cpu", delayed=True)["gradients"] == ("cpu", "bf16")
    with pytest.raises(InputError, match="delayed needs the optimizer offloaded"):
        stored_kinds(RECIPES["fp32"], "adamw", Offload(delayed=True))


def test_bytes_of_a_rank():
    """1208 elements over 2 ranks: 600 and 4, in groups of at most 256."""
    strategy = Strategy(dp=2, zero=3, precision="bf16", offload=Offload(optimizer="disk", parameters="cpu", path="/d"))
    found = offload_forecast(strategy, "adamw", BUCKETS, {"dp": 1}, num_gathers=2, group_numel=256)
    assert (found.num_of_size, found.num_groups) == ({256: 2, 88: 1, 4: 1}, 4)
    assert found.working_set_bytes == 3 * 256 * (12 + 2)
    assert found.tier_bytes == {"disk": 3 * 4 * BLOCK_BYTES, "cpu": 604 * 2}
    disk, host = found.traffic("disk"), found.traffic("cpu")
    assert disk.read_bytes == disk.written_bytes == 604 * 12
    assert (host.read_bytes, host.written_bytes) == (2 * 604 * 2, 604 * 2)
    assert (disk.rows["master"].reads, host.rows["parameters"].reads) == (4, 8)


def test_later_reductions_add_to_what_is_there():
    strategy = Strategy(dp=2, zero=2, offload=Offload(gradients="cpu"))
    found = offload_forecast(strategy, "adamw", BUCKETS, num_reductions=3).traffic("cpu")
    assert (found.read_bytes, found.written_bytes) == (3 * 604 * 4, 3 * 604 * 4)
    once = offload_forecast(strategy, "adamw", BUCKETS).traffic("cpu")
    assert (once.read_bytes, once.written_bytes) == (604 * 4, 604 * 4)


def test_nothing_offloaded_costs_nothing():
    found = offload_forecast(Strategy(), "adamw", BUCKETS)
    assert (found.working_set_bytes, found.tier_bytes, found.traffic("cpu").rows) == (0, {}, {})


def test_seconds():
    strategy = Strategy(precision="bf16", offload=Offload(optimizer="cpu"))
    taken = offload_forecast(strategy, "adamw", BUCKETS).traffic("cpu")
    assert transfer_s(taken, 1e3, 2e3) == pytest.approx(1208 * 12 * (1e-3 + 0.5e-3))
    assert streamed_s(3.0, 1.0, 10) == pytest.approx(3.1)
    assert streamed_s(1.0, 3.0, 10) == pytest.approx(3.1)
    assert streamed_s(1.0, 3.0, 1) == streamed_s(1.0, 3.0, 0) == 4.0, "one group hides nothing"
