"""What witnesses report: bytes on the wire, and rows that add up."""

from __future__ import annotations

import pytest

from meshwright.core.measures import PRIMITIVES, Traffic, wire_bytes


@pytest.mark.parametrize(
    ("primitive", "share"),
    [
        ("all_reduce", 1.5),
        ("reduce_scatter", 0.75),
        ("all_gather", 0.75),
        ("all_to_all", 0.75),
        ("broadcast", 0.75),  # all ranks but one pass it on
        ("reduce", 0.75),
        ("send", 1),
    ],
)
def test_bytes_sent_by_one_of_four(primitive, share):
    assert wire_bytes(primitive, 4096, 4) == 4096 * share


@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_one_rank_sends_nothing(primitive):
    assert wire_bytes(primitive, 4096, 1) == 0


def test_an_unknown_primitive_is_not_priced():
    with pytest.raises(KeyError, match="all_reduc"):
        wire_bytes("all_reduc", 4096, 4)


def test_rows_add_up_and_survive_as_text():
    sent = Traffic()
    sent.add("all_reduce", "dp", "gradients", 800, 4, calls=2)
    sent.add("all_reduce", "dp", "gradients", 400, 4)
    sent.add("send", "pp", "forward", 100, 2)
    sent.add("all_gather", "tp", "forward", 100, 1)
    assert sent.wire_bytes == 3000 + 100
    assert sent.by_axis() == {"dp": 3000, "pp": 100}
    row = sent.rows["all_reduce", "dp", "gradients"]
    assert (row.calls, row.payload_bytes) == (3, 2000)
    assert Traffic.from_list(sent.to_list()) == sent
    assert [phase for (_, _, phase), _ in sent.sorted_rows()] == ["forward", "gradients"]
