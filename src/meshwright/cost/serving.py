"""Seconds of one step of a served model: some sequences decode, the rest of the step is chunks of prompts.

    product       the FLOPs of all its tokens, or its weights once through memory: whichever takes longer
    decoding      the keys and values of every sequence, once through memory
    prompts       their attention's FLOPs, at the device's rate of fused attention
    reductions    two all-reduces of [T, h] in each layer over tp, and one for the embedding; the logits are gathered
    stages        one after the other, as the engine runs them: a step takes the sum of all, not the longest

Weights are read once per *step*, whatever the batch: so decoding is bound by memory until about peak · β / (2 · memory
bandwidth) sequences share a step. Over more ranks of tp each reads less, but reductions need more rounds: there is a
degree beyond which a step takes longer. Host time (scheduling, launches, sampling) is counted where it was measured: on
CPU ranks, by `meshwright calibrate`.

With a measured profile the kernels are those of training (:mod:`meshwright.cost.kernels`); without one, FLOPs and bytes
stand for them. Sources: Pope et al. 2022, §3; Kwon et al. 2023, §4; Agrawal et al. 2024, §3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import exp, log
from typing import Protocol

from meshwright.core.axes import DP, EP, PP, TP, WORLD
from meshwright.core.cluster import ClusterSpec
from meshwright.core.measures import Traffic
from meshwright.core.model import ModelSpec
from meshwright.core.placement import dim_range, largest_part
from meshwright.core.serving import Layout
from meshwright.cost.compute import flops_per_s, peak_flops_per_s
from meshwright.cost.kernels import Rates, moved_elements, rates
from meshwright.cost.network import Route, boundary_link, flat_s, route
from meshwright.cost.terms import TimeTerm, total_s

LOGITS_BYTES = 4
"""Logits are joined, and chosen from, in fp32."""
WEIGHT_BYTES, CHOICE_BYTES = 4, 8
"""Of what a token's expert is weighed by, and of which one it is."""
WEIGHTS, KEYS, PRODUCTS, ATTENTION, STREAMS = "weights", "keys and values", "products", "attention", "streams"
HOST = "host"
LATENCY, REDUCTIONS, EXCHANGE, STAGES = "reductions, latency", "reductions, bytes", "experts' exchange", "stages"
LIMITS = {
    WEIGHTS: "memory bandwidth",
    KEYS: "memory bandwidth",
    STREAMS: "memory bandwidth",
    PRODUCTS: "compute",
    ATTENTION: "compute",
    HOST: "the server's own code",
    LATENCY: "the latency of the links",
    REDUCTIONS: "the bandwidth of the links",
    EXCHANGE: "the links between replicas that share experts",
    STAGES: "the links between stages",
}
"""Term → what it is limited by."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one step of a replica computes. Means need not be whole numbers."""

    num_decoding: float
    """Sequences with one token each."""
    context: float
    """Keys that each of those tokens sees."""
    num_prompt: float = 0.0
    """Tokens of prompts."""
    prompt_keys: float = 0.0
    """Keys that each of them sees, in the mean."""
    num_rows: float = 0.0
    """Tokens whose logits are wanted: those that decode, and the last of each prompt."""

    @property
    def num_tokens(self) -> float:
        """Of those that decode and of prompts."""
        return self.num_decoding + self.num_prompt


class Speed(Protocol):
    """What one device does per second."""

    def product_s(self, m: float, n: float, k: float, batch: float = 1.0) -> float:
        """Seconds of `batch` products [m, k] × [k, n]."""

    def stream_s(self, elements: float) -> float:
        """Seconds to move so many elements through memory once."""


@dataclass(frozen=True, slots=True)
class PlainRates:
    """Of a device that has no profile: FLOPs at one share of the peak, bytes at the whole bandwidth."""

    flops_per_s: float
    bytes_per_s: float
    element_bytes: int

    def product_s(self, m: float, n: float, k: float, batch: float = 1.0) -> float:
        """Seconds of `batch` products [m, k] × [k, n]."""
        return batch * max(2 * m * n * k / self.flops_per_s, self.stream_s(m * k + k * n + m * n))

    def stream_s(self, elements: float) -> float:
        """Seconds to move so many elements through memory once."""
        return elements * self.element_bytes / self.bytes_per_s


LARGE_ROWS = 512
"""Rows from which on a product on CPU ranks reaches what large ones do."""


@dataclass(frozen=True, slots=True)
class CoreRates(Rates):
    """Of a CPU rank with a profile: no tiles, but rates of few rows where they were measured, between which the
    logarithm of the rate goes in a line over that of the rows."""

    points: tuple[tuple[float, float], ...] = ()
    """(rows, FLOP/s), ascending, the last of large products."""

    def product_s(self, m: float, n: float, k: float, batch: float = 1.0) -> float:
        """Seconds of `batch` products [m, k] × [k, n]. Less than a row takes what one does."""
        if len(self.points) > 1:
            return batch * 2 * max(m, 1.0) * n * k / self._flops_per_s(max(m, 1.0))
        return batch * max(2 * m * n * k / self.points[0][1], self.stream_s(m * k + k * n + m * n))

    def memory_s(self, m: float, n: float, k: float, batch: float = 1.0) -> float:
        """What of it is for reading the weights: a product of one row, where that was measured."""
        if len(self.points) > 1:
            return batch * 2 * n * k / self.points[0][1]
        return batch * self.stream_s(m * k + k * n + m * n)

    def _flops_per_s(self, m: float) -> float:
        after = next((at for at, (rows, _) in enumerate(self.points) if rows >= m), len(self.points) - 1)
        (low, slow), (high, fast) = self.points[max(0, after - 1)], self.points[after]
        if m >= high or low == high:
            return fast
        share = log(m / low) / log(high / low)
        return exp((1 - share) * log(slow) + share * log(fast))


def arithmetic_balance(cluster: ClusterSpec, layout: Layout) -> float:
    """B*: sequences in a step from which on its products are bound by compute, peak · β / (2 · bandwidth).

    Raises InputError where the cluster states no peak for the layout's dtype.
    """
    strategy = layout.replica
    peak = peak_flops_per_s(cluster, strategy)
    return peak * strategy.recipe.parameter_bytes / (2 * cluster.device.memory_bandwidth_bytes_per_s)


class StepCosts:
    """Prices the steps of one replica.

    Args:
        model: what is served.
        layout: how it is divided.
        cluster: on what.

    Raises:
        InputError: the cluster states no peak for the layout's dtype.
    """

    def __init__(self, model: ModelSpec, layout: Layout, cluster: ClusterSpec) -> None:
        self.model = model
        self.layout = layout
        self.cluster = cluster
        self.element_bytes = layout.replica.recipe.parameter_bytes
        self.speed = _speed(cluster, layout)
        tp = layout.tp
        self.heads = largest_part(model, "heads", model.heads_size, tp)
        self.kv = largest_part(model, "kv_heads", model.kv_size, tp)
        self.values = largest_part(model, "heads", model.values_size, tp)
        self.vocab = largest_part(model, "vocab", model.vocab_size, tp)

    def step_s(self, work: Work) -> float:
        """Seconds of a step."""
        return total_s(self.terms(work))

    def terms(self, work: Work) -> tuple[TimeTerm, ...]:
        """The same by cause."""
        seconds = dict.fromkeys(LIMITS, 0.0)
        seconds[KEYS] = self._keys_s(work)
        seconds[ATTENTION] = self._prompts_s(work)
        seconds[STREAMS] = self._streams_s(work)
        for count, m, n, k, batch in self._products(work):
            product_s = self.speed.product_s(m, n, k, batch)
            weights_s = min(product_s, self._memory_s(m, n, k, batch))
            seconds[WEIGHTS] += count * weights_s
            seconds[PRODUCTS] += count * (product_s - weights_s)
        seconds[HOST] = self._host_s(work)
        self._add_links(seconds, work)
        return tuple(TimeTerm(name, value) for name, value in seconds.items())

    def _memory_s(self, m: float, n: float, k: float, batch: float) -> float:
        """What a product takes to pass its matrices through memory; computing takes the rest."""
        if isinstance(self.speed, CoreRates):
            return self.speed.memory_s(m, n, k, batch)
        return self.speed.stream_s(batch * (m * k + k * n + m * n))

    def _host_s(self, work: Work) -> float:
        """What the server's own code takes, where it was measured."""
        profile = self.cluster.device.profile
        if profile is None or self.cluster.backend != "gloo":
            return 0.0
        server = profile.server
        return server.step_s + server.layer_s * self.model.num_layers + server.sequence_s * work.num_decoding

    def _products(self, work: Work) -> list[tuple[float, float, float, float, float]]:
        """(how often, m, n, k, batch) of the products of all layers and of the head, on the first rank of tp."""
        model, tokens = self.model, work.num_tokens
        layers, sparse, h = model.num_layers, model.num_sparse_layers, model.hidden_size
        found = [*self._projections(work), (float(layers), tokens, float(h), float(self.values), 1.0)]
        found += self._mlp(layers - sparse, model.ffn_size, tokens)
        if sparse:
            found += self._experts(sparse, tokens)
        in_share = min(1.0, work.num_rows)  # a chunk inside a prompt wants no logits
        return [*found, (in_share, max(1.0, work.num_rows), float(self.vocab), float(h), 1.0)]

    def _projections(self, work: Work) -> list[tuple[float, float, float, float, float]]:
        """To queries, keys and values. Of latent attention, rows that decode take the projections of keys and values to
        their query and to the sum of latents, head by head; prompts to their tokens."""
        layers, tokens, h = float(self.model.num_layers), work.num_tokens, float(self.model.hidden_size)
        latent = self.model.latent
        if latent is None:
            return [(layers, tokens, float(self.heads + 2 * self.kv), h, 1.0)]
        heads, rank, q_rank = self.heads // self.model.head_dim, float(latent.kv_lora_rank), latent.q_lora_rank or 0
        rows, prompt = float(work.num_decoding), float(work.num_prompt)
        return [
            (layers, tokens, float(q_rank + latent.kv_down_size), h, 1.0),
            (layers, tokens, float(self.heads), float(q_rank) or h, 1.0),
            (layers * bool(prompt), prompt, float(heads * latent.kv_up_size), rank, 1.0),
            (layers * bool(rows), rows, rank, float(latent.qk_nope_head_dim), float(heads)),
            (layers * bool(rows), rows, float(latent.v_head_dim), rank, float(heads)),
        ]

    def _mlp(self, count: float, ffn_size: int, tokens: float) -> list[tuple[float, float, float, float, float]]:
        h, ffn = float(self.model.hidden_size), float(largest_part(self.model, "ffn", ffn_size, self.layout.tp))
        matrices = 2 if self.model.gated_mlp else 1
        return [(count, tokens, matrices * ffn, h, 1.0), (count, tokens, h, ffn, 1.0)] if count else []

    def _experts(self, count: int, tokens: float) -> list[tuple[float, float, float, float, float]]:
        """Of the experts of a rank those that tokens go to, by chance: E · (1 − (1 − k/E)^T)."""
        model, ep = self.model, self.layout.ep
        together = tokens * ep
        num, k, h = model.num_experts, model.experts_per_token, float(model.hidden_size)
        used = num * (1 - (1 - k / num) ** together) / ep
        rows = together * k / (used * ep) if used else 0.0
        ffn = float(largest_part(model, "ffn", model.expert_size, self.layout.tp))
        matrices = 2 if model.has_gated_experts else 1
        found = [
            (float(count), rows, matrices * ffn, h, used),
            (float(count), rows, h, ffn, used),
            (float(count), tokens, float(num), h, 1.0),
        ]
        return found + (self._mlp(count, model.shared_ffn_size, tokens) if model.shared_ffn_size else [])

    def _keys_s(self, work: Work) -> float:
        """What decoding reads of the cache."""
        of_cache = work.context * work.num_decoding * self.model.num_layers
        latent = self.model.latent
        if latent is None:
            return self.speed.stream_s(2 * self.kv * of_cache)
        heads = self.heads // self.model.head_dim  # all of them meet the same latent
        flops = 2 * heads * (latent.kv_down_size + latent.kv_lora_rank) * of_cache
        return max(self.speed.stream_s(latent.kv_down_size * of_cache), flops / self._attention_flops_per_s(1.0))

    def _prompts_s(self, work: Work) -> float:
        """2 · heads · d FLOPs of keys, and of values, for each token of a prompt and key it sees, in each layer."""
        flops = 2 * (self.heads + self.values) * work.num_prompt * work.prompt_keys * self.model.num_layers
        half = self.speed.profile.attention_half_keys if isinstance(self.speed, Rates) else 0.0
        reach = 2 * work.prompt_keys  # of a causal prompt: its length
        return flops / self._attention_flops_per_s(reach / (reach + half) if reach else 1.0)

    def _attention_flops_per_s(self, share: float) -> float:
        """What fused attention reaches, at a share of its best."""
        if not isinstance(self.speed, Rates):
            return _flops_per_s(self.speed)
        return self.speed.flops_per_s * self.speed.profile.attention_efficiency * share

    def _streams_s(self, work: Work) -> float:
        """What the kernels between the products read and write: as training's forward (`cost.kernels`)."""
        model = self.model
        activation = 3.0 if model.gated_mlp else 2.0
        copies = 2.0 * (model.positions == "rope")
        per_token = 10.0 * model.hidden_size
        if model.latent is not None:
            per_token += 2 * ((model.latent.q_lora_rank or 0) + model.latent.kv_lora_rank)
            copies += 1.0 + 2.0 * model.values_size / model.heads_size
        per_token += copies * (self.heads + self.kv)
        dense = largest_part(model, "ffn", model.ffn_size, self.layout.tp)
        num_sparse = model.num_sparse_layers if model.num_experts else 0
        inner = activation * dense * (model.num_layers - num_sparse) + num_sparse * self._expert_elements(activation)
        passes = 1.0  # on CPU ranks the server has kernels of its own
        if isinstance(self.speed, Rates) and not isinstance(self.speed, CoreRates):
            passes = self.speed.profile.stream_passes
        return self.speed.stream_s(passes * work.num_tokens * (model.num_layers * per_token + inner))

    def _expert_elements(self, activation: float) -> float:
        """Of a token in a layer of experts: inside of those that it goes to, and to them and back."""
        model, tp = self.model, self.layout.tp
        inside = model.experts_per_token * (3.0 if model.has_gated_experts else 2.0)
        inside *= largest_part(model, "ffn", model.expert_size, tp)
        shared = activation * largest_part(model, "ffn", model.shared_ffn_size or 0, tp)
        return inside + shared + moved_elements(model, self.layout.ep)

    # --- links ---------------------------------------------------------------------------------------------

    @cached_property
    def _routes(self) -> dict[str, Route]:
        replica, whole = self.layout.replica, self.layout.strategy
        return {
            TP: route(TP, self.model, replica, self.cluster),
            WORLD: route(WORLD, self.model, replica, self.cluster),
            EP: route(EP, self.model, whole, self.cluster),
        }

    @cached_property
    def _hops(self) -> list[tuple[float, float]]:
        """(latency, seconds per byte) from each stage to the next."""
        replica = self.layout.replica
        links = [boundary_link(rank, rank + 1, replica, self.cluster) for rank in range(replica.pp - 1)]
        return [(link.latency_s, 1 / link.bandwidth_bytes_per_s) for link in links]

    @cached_property
    def _latency_s(self) -> tuple[float, float]:
        """Of all reductions of a step, and of what is told to the ranks that follow."""
        tp, world = self._routes[TP], self._routes[WORLD]
        reductions_s = num_reductions(self.model) * tp.seconds("all_reduce", 0) + tp.seconds("all_gather", 0)
        return reductions_s, 2 * world.seconds("broadcast", 0)

    def _add_links(self, seconds: dict[str, float], work: Work) -> None:
        hidden_bytes = work.num_tokens * self.model.hidden_size * self.element_bytes
        tp = self._routes[TP]
        if tp.size > 1:
            sums, latency_s = num_reductions(self.model), self._latency_s[0]
            gathered = work.num_rows * self.vocab * tp.size * LOGITS_BYTES
            all_s = sums * tp.seconds("all_reduce", hidden_bytes) + tp.seconds("all_gather", gathered)
            seconds[LATENCY], seconds[REDUCTIONS] = latency_s, max(0.0, all_s - latency_s)
        if self._routes[WORLD].size > 1:
            seconds[LATENCY] += self._latency_s[1]
        if self.layout.ep > 1:
            seconds[EXCHANGE] = self.model.num_sparse_layers * self._exchange_s(work.num_tokens, hidden_bytes)
        seconds[STAGES] = sum(latency_s + hidden_bytes * per_byte for latency_s, per_byte in self._hops)
        if self._hops:
            back = boundary_link(0, self.layout.pp - 1, self.layout.replica, self.cluster)
            logits = work.num_rows * self.vocab * self.element_bytes
            seconds[STAGES] += flat_s("send", logits, 2, back, self.cluster.backend)

    def _exchange_s(self, num_tokens: float, hidden_bytes: float) -> float:
        """A layer's tokens, their weights and choices to all replicas that share its experts, and sums back."""
        ep, together = self._routes[EP], self.layout.ep
        per_token = num_tokens * self.model.experts_per_token * together
        moved_s = sum(ep.seconds(name, together * hidden_bytes) for name in ("all_gather", "reduce_scatter"))
        return moved_s + sum(ep.seconds("all_gather", size * per_token) for size in (WEIGHT_BYTES, CHOICE_BYTES))


def num_reductions(model: ModelSpec) -> int:
    """All-reduces over tp in a step: two in each layer, one for the embedding."""
    return 2 * model.num_layers + 1


def step_traffic(
    model: ModelSpec,
    layout: Layout,
    rank: int,
    num_tokens: int,
    num_rows: int,
    num_words: int,
    index: int = 0,
    replica: int = 0,
    shared: Sequence[int] = (),
    other_words: Sequence[int] = (),
) -> Traffic:
    """What rank `index` of tp of pipeline rank `rank` sends in one step of a replica: what the engine's ledger counts.

    Args:
        num_tokens: of the step.
        num_rows: of them, whose logits are wanted.
        num_words: int64 numbers that describe the step to the ranks that follow.
        replica: which one.
        shared: tokens of each replica that shares its experts; empty: all have as many.
        other_words: as `num_words`, of each other replica that steps beside the first.
    """
    total, element_bytes = Traffic(), layout.replica.recipe.parameter_bytes
    tp, pp = layout.tp, layout.pp
    layers = layout.replica.stage_layers(model.num_layers)[rank]
    token_bytes = model.hidden_size * element_bytes
    hidden_bytes = num_tokens * token_bytes
    part = largest_part(model, "vocab", model.vocab_size, tp)
    shared, num_sparse = shared or (num_tokens,) * layout.ep, sum(map(model.is_sparse, layers))
    apart = num_sparse if model.shared_ffn_size else 0  # experts that all tokens have are summed by themselves
    num_own = 2 * len(layers) + (rank == 0) - num_sparse + apart
    total.add("all_reduce", TP, "other", hidden_bytes, tp, calls=num_own)
    total.add("all_reduce", TP, "other", sum(shared) * token_bytes, tp, calls=num_sparse)  # before tokens go home
    if num_rows and rank == 0:
        total.add("all_gather", TP, "other", tp * part * num_rows * LOGITS_BYTES, tp)
    if rank < pp - 1:
        total.add("send", PP, "other", hidden_bytes, pp)
    elif num_rows:
        own = dim_range(model, "vocab", model.vocab_size, tp, index)[1]
        total.add("send", PP, "other", own * num_rows * element_bytes, pp)
    _add_exchange(total, model, layout, num_sparse, max(shared))
    _add_telling(total, layout, rank, (1, num_words))
    if rank == index == 0 and replica == 0:
        for words in other_words:
            for count in (1, words):
                total.add("send", DP, "other", 8 * count, layout.replicas)
    elif rank == index == 0 and num_rows:
        total.add("send", DP, "other", num_rows * model.vocab_size * LOGITS_BYTES, layout.replicas)
    return total


def _add_exchange(total: Traffic, model: ModelSpec, layout: Layout, num_sparse: int, most_tokens: int) -> None:
    """Of replicas that share experts: tokens, their weights and choices to all of them, padded to the most that one
    has, and sums back."""
    ep, per_token = layout.ep, layout.ep * most_tokens
    hidden_bytes = per_token * model.hidden_size * layout.replica.recipe.parameter_bytes
    for name in ("all_gather", "reduce_scatter"):
        total.add(name, EP, "other", hidden_bytes, ep, calls=num_sparse)
    for size in (WEIGHT_BYTES, CHOICE_BYTES):
        total.add("all_gather", EP, "other", per_token * model.experts_per_token * size, ep, calls=num_sparse)


def _add_telling(total: Traffic, layout: Layout, rank: int, counts: Iterable[int]) -> None:
    """Of int64 numbers that the first rank of a replica tells its others, from the first stage on along pp."""
    axes = {WORLD: layout.tp * layout.pp}
    if layout.replicas > 1:
        axes = {PP: layout.pp} if rank else {TP: layout.tp, PP: layout.pp}
    for count in counts:
        for axis, size in axes.items():
            total.add("broadcast", axis, "other", 8 * count, size)


def _speed(cluster: ClusterSpec, layout: Layout) -> Rates | PlainRates:
    strategy, device = layout.replica, cluster.device
    peak_flops_per_s(cluster, strategy)  # refuses where there is none
    dtype, element_bytes = strategy.recipe.parameter, strategy.recipe.parameter_bytes
    if device.profile is not None:
        found = rates(device, device.profile, dtype, element_bytes)
        if cluster.backend != "gloo":
            return found
        few = sorted((float(rows), rate) for name, rows, rate in device.profile.server.few_rows if name == dtype)
        points = (*few, (float(LARGE_ROWS), found.flops_per_s * device.profile.matmul_efficiency))
        return CoreRates(**{field.name: getattr(found, field.name) for field in fields(found)}, points=points)
    return PlainRates(flops_per_s(cluster, strategy), device.memory_bandwidth_bytes_per_s, element_bytes)


def _flops_per_s(speed: Speed) -> float:
    assert isinstance(speed, PlainRates)
    return speed.flops_per_s
