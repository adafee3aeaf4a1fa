"""ModelSpec: the shape of a decoder, and the one table of its parameters.

`ModelSpec.parameters()` names every logical parameter with its global shape and the *name of each
dim* ("vocab", "heads", "ffn", ...). Placement, memory, initialisation, checkpoints and the Hugging
Face maps are all derived from this table; modules in `models/` use the same names and shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from pydantic import Field, model_validator

from meshwright.core.errors import InputError, UnsupportedError
from meshwright.core.latent import LatentAttention, RopeScaling, YarnScaling
from meshwright.core.router import RouterSpec
from meshwright.core.units import counted
from meshwright.core.values import MAX_SIZE, Value

MAX_LAYERS = 100_000
"""Layers, or of a mixture layers × experts."""

Family = Literal[
    "gpt2",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "mixture",
    "bloom",
]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One logical parameter. Weights are stored [out, in], as torch does."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    """Name of each dim: vocab, position, embed, heads, kv_heads, head_dim, latent, ffn, experts, logits (of a router),
    one."""
    part: str
    """embedding, attention, mlp, norm, router or head."""
    layer: int | None
    """Global layer index; None for embeddings, final norm and head."""

    @property
    def numel(self) -> int:
        return prod(self.shape)


class ModelSpec(Value):
    """The shape of one decoder-only transformer."""

    name: str
    family: Family
    vocab_size: int = Field(gt=0, le=MAX_SIZE)
    hidden_size: int = Field(gt=0, le=MAX_SIZE)
    num_layers: int = Field(gt=0, le=MAX_LAYERS)
    num_heads: int = Field(gt=0, le=MAX_SIZE)
    num_kv_heads: int = Field(gt=0, le=MAX_SIZE)
    """Fewer than `num_heads` where queries share keys and values; divides them."""
    head_dim: int = Field(gt=0, le=MAX_SIZE)
    ffn_size: int = Field(gt=0, le=MAX_SIZE)
    """Inner width of the MLP; in a mixture of each expert too, where they have no `expert_ffn_size`."""
    max_positions: int = Field(gt=0, le=MAX_SIZE)
    norm: Literal["layernorm", "rmsnorm"]
    norm_eps: float = Field(default=1e-5, gt=0)
    positions: Literal["learned", "rope", "alibi"]
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | YarnScaling | None = None
    activation: Literal["gelu", "gelu_tanh", "silu"]
    gated_mlp: bool
    """down(act(gate(x)) · up(x)) instead of down(act(up(x)))."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    latent: LatentAttention | None = None
    """Multi-head latent attention; None: keys and values are projected from the hidden state itself."""
    qk_norm: bool = False
    """A norm over each head of queries and keys."""
    embedding_norm: bool = False
    """A norm right after the embedding."""
    tied_embeddings: bool = False
    """The head's weight is the embedding's."""
    sliding_window: int | None = Field(default=None, gt=0)
    """Tokens that a query looks back at; None for all."""
    num_experts: int = Field(default=0, ge=0)
    """Of a layer; 0 for a dense model."""
    experts_per_token: int = Field(default=0, ge=0)
    expert_ffn_size: int | None = Field(default=None, gt=0, le=MAX_SIZE)
    """Inner width of one expert; None: `ffn_size`."""
    gated_experts: bool | None = None
    """Whether experts are gated; None: as `gated_mlp` says."""
    shared_ffn_size: int | None = Field(default=None, gt=0, le=MAX_SIZE)
    """Inner width of the experts that every token passes, all together; None: there are none."""
    shared_gate: bool | None = None
    """Whether the shared experts' output is multiplied by a sigmoid of the token."""
    dense_layers: tuple[int, ...] | None = None
    """Layers of a mixture that have a plain MLP instead of experts."""
    router: RouterSpec | None = None
    """How tokens find their experts; None: the defaults, or no experts."""
    initializer_std: float = Field(default=0.02, ge=0)

    @model_validator(mode="after")
    def _consistent(self) -> ModelSpec:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if bool(self.num_experts) != bool(self.experts_per_token):
            raise ValueError("num_experts and experts_per_token must both be set, or neither")
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} is more than num_experts {self.num_experts}")
        if self.num_layers * self.num_experts > MAX_LAYERS:
            raise ValueError(f"{self.num_layers} layers of {self.num_experts} experts: at most {MAX_LAYERS:,} together")
        self._check_experts()
        self._check_latent()
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary positions rotate pairs")
        return self

    def _check_experts(self) -> None:
        own = ("expert_ffn_size", "gated_experts", "shared_ffn_size", "shared_gate", "dense_layers", "router")
        given = [name for name in own if getattr(self, name) is not None]
        if not self.num_experts:
            if given:
                raise ValueError(f"{given[0]} is for mixtures of experts; set num_experts and experts_per_token")
            return
        if self.mlp_bias:
            raise ValueError("mlp_bias with experts: experts have no biases")
        if self.shared_gate and not self.shared_ffn_size:
            raise ValueError("shared_gate needs shared_ffn_size")
        dense = list(self.dense_layers or ())
        if not all(0 <= layer < self.num_layers for layer in dense):
            raise ValueError(f"dense_layers {dense}: layers go from 0 to {self.num_layers - 1}")
        if dense != sorted(set(dense)) or len(dense) == self.num_layers:
            raise ValueError("dense_layers must ascend, each once, and leave a layer of experts")
        groups, per_group = self.gate.num_groups, self.num_experts // self.gate.num_groups
        if self.num_experts % groups or self.gate.groups_per_token * per_group < self.experts_per_token:
            raise ValueError(
                f"num_groups {groups} must divide num_experts {self.num_experts}, and groups_per_token "
                f"{self.gate.groups_per_token} of them must hold experts_per_token {self.experts_per_token}"
            )

    def _check_latent(self) -> None:
        if self.latent is None:
            return
        if self.head_dim != self.latent.head_dim:
            raise ValueError(
                f"head_dim {self.head_dim} is not qk_nope_head_dim + qk_rope_head_dim = {self.latent.head_dim}"
            )
        for name, is_set in (
            (f"num_kv_heads {self.num_kv_heads} of {self.num_heads}", self.num_kv_heads != self.num_heads),
            (f"positions {self.positions}", self.positions != "rope"),
            ("qkv_bias", self.qkv_bias),
            ("qk_norm", self.qk_norm),
        ):
            if is_set:
                raise ValueError(f"{name} with latent attention: it has all heads, rotary positions and no biases")

    @property
    def has_noise(self) -> bool:
        """Whether its routers draw, in training."""
        return self.num_experts > 0 and self.gate.noise != "none"

    @property
    def gate(self) -> RouterSpec:
        """`router`, or the defaults."""
        return self.router or RouterSpec()

    @property
    def expert_size(self) -> int:
        """Inner width of one expert."""
        return self.expert_ffn_size or self.ffn_size

    @property
    def has_gated_experts(self) -> bool:
        return self.gated_mlp if self.gated_experts is None else self.gated_experts

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.num_experts > 0 and layer not in (self.dense_layers or ())

    def count_layers(self, layers: range, is_sparse: bool) -> int:
        """Of these layers, those with experts, or those without."""
        dense = sum(layer in layers for layer in self.dense_layers or ()) if self.num_experts else len(layers)
        return len(layers) - dense if is_sparse else dense

    @property
    def num_sparse_layers(self) -> int:
        return self.num_layers - len(self.dense_layers or ()) if self.num_experts else 0

    def check_length(self, num_tokens: int) -> None:
        """Refuse sequences that the model cannot take.

        Raises:
            InputError: more tokens than learned positions.
            UnsupportedError: more tokens than the sliding window.
        """
        if self.positions == "learned" and num_tokens > self.max_positions:
            raise InputError(
                f"{counted(num_tokens, 'token')}, but `{self.name}` has {self.max_positions} learned positions; "
                "shorten the sequences"
            )
        if self.sliding_window is not None and num_tokens > self.sliding_window:
            raise UnsupportedError(
                f"{num_tokens} tokens are more than the sliding window of {self.sliding_window} of `{self.name}`; "
                f"windowed attention is not implemented, use sequences of at most {self.sliding_window}"
            )

    def length_warning(self, num_tokens: int) -> str | None:
        """One line where the model cannot be trained on sequences so long, or rotary positions are asked for beyond
        those that it is made for; else None."""
        if self.sliding_window is not None and num_tokens > self.sliding_window:
            return (
                f"sequences of {num_tokens:,} tokens are forecast without the sliding window of "
                f"{self.sliding_window:,} of `{self.name}`, and can't be trained: windowed attention is not implemented"
            )
        if self.positions != "rope" or num_tokens <= self.max_positions:
            return None
        return (
            f"sequences of {num_tokens:,} tokens, but `{self.name}` is made for {self.max_positions:,} positions: "
            "rotary ones go on behind them, where pretrained weights have never been"
        )

    @property
    def heads_size(self) -> int:
        """Width of the query projection: heads × head_dim (not always the hidden size)."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def values_size(self) -> int:
        """Width of what attention gives to its output projection."""
        return self.num_heads * self.latent.v_head_dim if self.latent else self.heads_size

    @property
    def rotary_dim(self) -> int:
        """Dims of a head that turn with the position."""
        return self.latent.qk_rope_head_dim if self.latent else self.head_dim

    @cached_property
    def _table(self) -> tuple[ParamSpec, ...]:
        return tuple(_parameters(self))

    def parameters(self) -> tuple[ParamSpec, ...]:
        """Every logical parameter once, in forward order. A tied head has no entry of its own."""
        return self._table

    def router_biases(self) -> tuple[ParamSpec, ...]:
        """What a gate with a bias keeps besides its parameters: [E] of each layer of experts, fp32, moved by no
        gradient. A checkpoint holds them too."""
        if not (self.num_experts and self.gate.bias):
            return ()
        layers = (layer for layer in range(self.num_layers) if self.is_sparse(layer))
        shape = (self.num_experts,)
        return tuple(ParamSpec(f"layers.{i}.mlp.router.bias", shape, ("logits",), "router", i) for i in layers)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel for p in self.parameters())

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token uses: of the experts, `experts_per_token` of them."""
        if not self.num_experts:
            return self.num_parameters
        experts = sum(p.numel for p in self.parameters() if "experts" in p.dims)
        return self.num_parameters - experts + experts * self.experts_per_token // self.num_experts


def _norm(spec: ModelSpec, name: str, layer: int | None) -> Iterator[ParamSpec]:
    yield ParamSpec(f"{name}.weight", (spec.hidden_size,), ("embed",), "norm", layer)
    if spec.norm == "layernorm":
        yield ParamSpec(f"{name}.bias", (spec.hidden_size,), ("embed",), "norm", layer)


def _linear(
    name: str, out: tuple[str, int], into: tuple[str, int], bias: bool, part: str, layer: int | None
) -> Iterator[ParamSpec]:
    yield ParamSpec(f"{name}.weight", (out[1], into[1]), (out[0], into[0]), part, layer)
    if bias:
        yield ParamSpec(f"{name}.bias", (out[1],), (out[0],), part, layer)


def _attention(spec: ModelSpec, layer: int) -> Iterator[ParamSpec]:
    at = f"layers.{layer}.attention"
    if spec.latent is not None:
        yield from _latent_attention(spec, spec.latent, at, layer)
        return
    embed, heads, kv = ("embed", spec.hidden_size), ("heads", spec.heads_size), ("kv_heads", spec.kv_size)
    yield from _linear(f"{at}.q", heads, embed, spec.qkv_bias, "attention", layer)
    yield from _linear(f"{at}.k", kv, embed, spec.qkv_bias, "attention", layer)
    yield from _linear(f"{at}.v", kv, embed, spec.qkv_bias, "attention", layer)
    if spec.qk_norm:
        yield ParamSpec(f"{at}.q_norm.weight", (spec.head_dim,), ("head_dim",), "norm", layer)
        yield ParamSpec(f"{at}.k_norm.weight", (spec.head_dim,), ("head_dim",), "norm", layer)
    yield from _linear(f"{at}.o", embed, heads, spec.out_bias, "attention", layer)


def _latent_attention(spec: ModelSpec, latent: LatentAttention, at: str, layer: int) -> Iterator[ParamSpec]:
    """Down to the latents, their norms, up to the heads."""
    embed, source = ("embed", spec.hidden_size), ("embed", spec.hidden_size)
    if latent.q_lora_rank:
        source = ("latent", latent.q_lora_rank)
        yield from _linear(f"{at}.latents.q", source, embed, False, "attention", layer)
    yield from _linear(f"{at}.latents.kv", ("latent", latent.kv_down_size), embed, False, "attention", layer)
    norms = {"q_norm": latent.q_lora_rank, "kv_norm": latent.kv_lora_rank}
    for name, size in norms.items():
        if size:
            yield ParamSpec(f"{at}.latents.{name}.weight", (size,), ("latent",), "norm", layer)
    yield from _linear(f"{at}.q", ("heads", spec.heads_size), source, False, "attention", layer)
    up = ("heads", spec.num_heads * latent.kv_up_size)
    yield from _linear(f"{at}.kv", up, ("latent", latent.kv_lora_rank), False, "attention", layer)
    yield from _linear(f"{at}.o", embed, ("heads", spec.values_size), spec.out_bias, "attention", layer)


def _mlp(spec: ModelSpec, at: str, layer: int, ffn_size: int) -> Iterator[ParamSpec]:
    embed, ffn = ("embed", spec.hidden_size), ("ffn", ffn_size)
    if spec.gated_mlp:
        yield from _linear(f"{at}.gate", ffn, embed, spec.mlp_bias, "mlp", layer)
    yield from _linear(f"{at}.up", ffn, embed, spec.mlp_bias, "mlp", layer)
    yield from _linear(f"{at}.down", embed, ffn, spec.mlp_bias, "mlp", layer)


def _experts(spec: ModelSpec, at: str, layer: int) -> Iterator[ParamSpec]:
    """Router, then each matrix of all experts as one parameter, then what every token passes."""
    h, f, num = spec.hidden_size, spec.expert_size, spec.num_experts
    embed, experts = ("embed", h), ("experts", num)
    yield from _linear(f"{at}.router", ("logits", num), embed, False, "router", layer)
    if spec.gate.noise == "gaussian":
        yield from _linear(f"{at}.router.noise", ("logits", num), embed, False, "router", layer)
    for name in ("gate", "up") if spec.has_gated_experts else ("up",):
        dims = (experts[0], "ffn", embed[0])
        yield ParamSpec(f"{at}.experts.{name}.weight", (num, f, h), dims, "mlp", layer)
    yield ParamSpec(f"{at}.experts.down.weight", (num, h, f), (experts[0], embed[0], "ffn"), "mlp", layer)
    if spec.shared_ffn_size:
        yield from _mlp(spec, f"{at}.shared", layer, spec.shared_ffn_size)
    if spec.shared_gate:
        yield from _linear(f"{at}.shared_gate", ("one", 1), embed, False, "router", layer)


def _layer(spec: ModelSpec, layer: int) -> Iterator[ParamSpec]:
    at = f"layers.{layer}"
    yield from _norm(spec, f"{at}.attention_norm", layer)
    yield from _attention(spec, layer)
    yield from _norm(spec, f"{at}.mlp_norm", layer)
    if spec.is_sparse(layer):
        yield from _experts(spec, f"{at}.mlp", layer)
    else:
        yield from _mlp(spec, f"{at}.mlp", layer, spec.ffn_size)


def _parameters(spec: ModelSpec) -> Iterator[ParamSpec]:
    vocab, embed = ("vocab", spec.vocab_size), ("embed", spec.hidden_size)
    yield from _linear("embedding", vocab, embed, False, "embedding", None)
    if spec.positions == "learned":
        yield from _linear("positions", ("position", spec.max_positions), embed, False, "embedding", None)
    if spec.embedding_norm:
        yield from _norm(spec, "embedding_norm", None)
    for layer in range(spec.num_layers):
        yield from _layer(spec, layer)
    yield from _norm(spec, "final_norm", None)
    if not spec.tied_embeddings:
        yield from _linear("head", vocab, embed, False, "head", None)
