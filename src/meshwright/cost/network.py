"""Seconds of one collective: the α-β model over the links that a mesh axis really uses.

    seconds = rounds · latency + bytes sent per rank / bandwidth

An axis whose ranks lie on several nodes goes either in one flat ring, at the speed of the link between nodes, or in two
levels (reduce-scatter inside the node, exchange between nodes, all-gather inside the node); NCCL takes the faster of
the two, gloo the flat ring. Of an all-to-all what stays within a node goes beside what leaves it. Where the strategy
itself goes in two levels (`core.sharding`), each level is an axis of its own: `dp_node` never leaves a node, and a
group of `dp_across` has one rank on each.

Sources: Thakur, Rabenseifner & Gropp 2005; Patarasuk & Yuan 2009 (ring); Mikami et al. 2018 (two levels);
Sanders, Speck & Träff 2009 (double tree, 2·log2 P rounds).
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.core.axes import (
    CP,
    DP,
    DP_ACROSS,
    DP_CP,
    DP_NODE,
    EDP,
    EP,
    ETP,
    PP,
    PP_ENDS,
    PP_MIRROR,
    TP,
    TP_KV,
    WORLD,
)
from meshwright.core.cluster import ClusterSpec, Link
from meshwright.core.measures import wire_bytes
from meshwright.core.model import ModelSpec
from meshwright.core.strategy import Strategy
from meshwright.cost.traffic import group_sizes


@dataclass(frozen=True, slots=True)
class Route:
    """How the ranks of one axis reach each other."""

    size: int
    num_local: int
    """Ranks of a group on one node; 1 where they are not equally many on every node."""
    intra: Link
    inter: Link | None
    """None where every group lies within one node."""
    backend: str

    def seconds(self, primitive: str, payload_bytes: float) -> float:
        """Seconds of one call over this axis; `payload_bytes` as in :func:`meshwright.core.measures.wire_bytes`."""
        if primitive == "all_to_all":
            return self.exchange_s(payload_bytes)
        slowest = self.inter or self.intra
        flat = flat_s(primitive, payload_bytes, self.size, slowest, self.backend)
        if self.inter is None or self.backend == "gloo" or self.num_local == 1:
            return flat
        return min(flat, self._two_level_s(primitive, payload_bytes, self.inter))

    def exchange_s(self, payload_bytes: float, num_copies: int = 1) -> float:
        """Seconds of an all-to-all, over both kinds of link at once: what stays within a node does not pass between
        nodes.

        Args:
            payload_bytes: that a rank has for all.
            num_copies: of each token, that go to ranks chosen at random; those for one node, or one rank, go there
                once. In the mean n·(1 − (1 − 1/n)^k) of n places are chosen by k copies.
        """
        inter = self.inter
        if inter is None or self.num_local == 1 or self.backend == "gloo":
            bytes_of_all = payload_bytes * _share_chosen(self.size, num_copies)
            return flat_s("all_to_all", bytes_of_all, self.size, inter or self.intra, self.backend)
        latency_s = num_rounds("all_to_all", self.size, self.backend) * inter.latency_s
        num_nodes = self.size // self.num_local
        across = (num_nodes - 1) / num_nodes * _share_chosen(num_nodes, num_copies)
        inside = (self.num_local - 1) / self.size * _share_chosen(self.size, num_copies)
        across_s = across / (inter.collective_share * inter.bandwidth_bytes_per_s)
        inside_s = inside / (self.intra.collective_share * self.intra.bandwidth_bytes_per_s)
        return latency_s + payload_bytes * max(across_s, inside_s)

    def _two_level_s(self, primitive: str, payload_bytes: float, inter: Link) -> float:
        if primitive not in ("all_reduce", "reduce_scatter", "all_gather"):
            return float("inf")
        inside = ("reduce_scatter", "all_gather") if primitive == "all_reduce" else (primitive,)
        num_nodes = self.size // self.num_local
        across = flat_s(primitive, payload_bytes / self.num_local, num_nodes, inter, self.backend)
        return across + sum(flat_s(p, payload_bytes, self.num_local, self.intra, self.backend) for p in inside)


def _share_chosen(num_places: int, num_copies: int) -> float:
    """Places that so many copies choose at random, per copy."""
    return num_places * (1 - (1 - 1 / num_places) ** num_copies) / num_copies


def num_rounds(primitive: str, size: int, backend: str) -> int:
    """Messages that must follow one another in one call.

    gloo goes round the ring. NCCL picks trees where they need fewer rounds.
    """
    if size == 1:
        return 0
    ring, tree = size - 1, (size - 1).bit_length()
    rounds = ring if backend == "gloo" else min(ring, tree)
    return {"all_reduce": 2 * rounds, "all_to_all": ring, "broadcast": tree, "reduce": tree, "send": 1}.get(
        primitive, rounds
    )


def flat_s(primitive: str, payload_bytes: float, size: int, link: Link, backend: str) -> float:
    """Seconds of one call over `size` ranks that all use `link`."""
    latency_s = num_rounds(primitive, size, backend) * link.latency_s
    share = 1.0 if primitive == "send" else link.collective_share
    is_rooted = size > 1 and primitive in ("broadcast", "reduce")  # the slowest rank, not the mean
    sent_bytes = round(payload_bytes) if is_rooted else wire_bytes(primitive, round(payload_bytes), size)
    return latency_s + sent_bytes / (share * link.bandwidth_bytes_per_s)


def route(axis: str, model: ModelSpec, strategy: Strategy, cluster: ClusterSpec) -> Route:
    """The route of a mesh axis or of a named sub-group. Rank order as in :mod:`meshwright.core.axes`.

    A group with stride k and n members lies in a block of k·n consecutive ranks. Blocks that tile a node keep every
    group inside it; any other block is cut by a node's edge, and then some group crosses.
    """
    size, stride = group_sizes(model, strategy)[axis], _stride(axis, strategy)
    per_node = cluster.devices_per_node
    block = size * stride
    is_of_ends = axis in (PP_ENDS, PP_MIRROR)
    crosses = size > 1 and cluster.num_nodes > 1 and (is_of_ends or per_node % block > 0)
    even = not is_of_ends and stride <= per_node and per_node % stride == 0 and block % per_node == 0
    return Route(
        size=size,
        num_local=per_node // stride if crosses and even else 1,
        intra=cluster.intra_link,
        inter=cluster.inter_link if crosses else None,
        backend=cluster.backend,
    )


def _stride(axis: str, strategy: Strategy) -> int:
    """Ranks from one member of a group to the next."""
    per_stage = strategy.data_ranks * strategy.tp
    return {
        TP: 1,
        TP_KV: 1,
        **_grid_strides(strategy),
        CP: strategy.tp,
        DP: strategy.cp * strategy.tp,
        DP_CP: strategy.tp,
        ETP: 1,
        EP: strategy.et,
        EDP: strategy.et * strategy.ep,
        DP_NODE: strategy.tp,
        DP_ACROSS: strategy.tp * strategy.dp_local,
        PP: per_stage,
        PP_ENDS: (strategy.pp - 1) * per_stage,
        PP_MIRROR: (strategy.pp - 1) * per_stage,
        WORLD: 1,
    }[axis]


def _grid_strides(strategy: Strategy) -> dict[str, int]:
    """Of the sub-axes of tp."""
    strides, stride = {}, 1
    for axis, size in reversed(strategy.grid.axes):
        strides[axis] = stride
        stride *= size
    return strides


def boundary_link(rank: int, other: int, strategy: Strategy, cluster: ClusterSpec) -> Link:
    """The slowest link between the ranks of two positions of the pipelines."""
    block = strategy.data_ranks * strategy.tp
    first, last = min(rank, other) * block, (max(rank, other) + 1) * block - 1
    within = first // cluster.devices_per_node == last // cluster.devices_per_node
    return cluster.intra_link if within else cluster.inter_link
