"""Our parameter names ↔ Hugging Face tensor names, one table per family.

A row says where a parameter stands in a Hugging Face tensor:

    plain         theirs = ours
    transposed    theirs = oursᵀ (GPT-2 stores [in, out])
    block i of n  ours is the i-th of n equal parts of one of their tensors, along our first dim
    by expert     ours is a stack of theirs along our first dim: `{expert}` in the name

    c_attn.weight [h, 3h]  =  [ qᵀ | kᵀ | vᵀ ]
    experts.up.weight [E, f, h]  =  experts.0.up_proj.weight, experts.1.up_proj.weight, ...
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from meshwright.core.errors import UnsupportedError
from meshwright.core.model import ModelSpec, ParamSpec
from meshwright.core.placement import Box

_EXPERT = "{expert}"


@dataclass(frozen=True, slots=True)
class Source:
    """Where one parameter stands. `name` holds `{prefix}` (and `{expert}`), and `{layer}` until it is filled in."""

    name: str
    transposed: bool = False
    block: int = 0
    num_blocks: int = 1

    @property
    def is_by_expert(self) -> bool:
        return _EXPERT in self.name

    def of_expert(self, index: int) -> Source:
        """Likewise of one expert."""
        return Source(self.name.replace(_EXPERT, str(index)), self.transposed)

    def names(self, param: ParamSpec) -> list[str]:
        """Names of all tensors that ours is made of."""
        return [self.name.replace(_EXPERT, str(i)) for i in range(param.shape[0])] if self.is_by_expert else [self.name]

    def shape(self, param: ParamSpec) -> tuple[int, ...]:
        """Shape of their whole tensor."""
        whole = (self.num_blocks * param.shape[0], *param.shape[1:])
        return whole[::-1] if self.transposed else whole

    def slices(self, param: ParamSpec, box: Box) -> tuple[slice, ...]:
        """Where `box` of our parameter lies in their tensor."""
        first, *rest = box.slices
        shift = self.block * param.shape[0]
        ours = (slice(first.start + shift, first.stop + shift), *rest)
        return ours[::-1] if self.transposed else ours


@dataclass(frozen=True, slots=True)
class NameMap:
    """The names of a family. The first prefix is the one that is written."""

    prefixes: tuple[str, ...]
    rows: Mapping[str, Source]
    ignored: tuple[str, ...] = ()
    """Ends of names of constant tables that some checkpoints carry."""
    skips_further_layers: bool = False
    """Whether layers behind the last are left out: modules that predict further tokens."""

    def sources(self, spec: ModelSpec) -> dict[str, Source]:
        """Our name → source, `{layer}` filled in, `{prefix}` not yet."""
        return {param.name: self._source(param) for param in (*spec.parameters(), *spec.router_biases())}

    def _source(self, param: ParamSpec) -> Source:
        if param.layer is None:
            return self.rows[param.name]
        row = self.rows[param.name.removeprefix(f"layers.{param.layer}.")]
        name = row.name.replace("{layer}", str(param.layer))
        return Source(name, row.transposed, row.block, row.num_blocks)


def _pairs(rows: dict[str, tuple[str, bool]]) -> dict[str, Source]:
    """Weight and bias of each module; weights of the marked ones are transposed."""
    both = {}
    for ours, (theirs, transposed) in rows.items():
        both[f"{ours}.weight"] = Source(f"{theirs}.weight", transposed)
        both[f"{ours}.bias"] = Source(f"{theirs}.bias")
    return both


_GPT2 = _pairs(
    {
        "embedding": ("{prefix}wte", False),
        "positions": ("{prefix}wpe", False),
        "attention_norm": ("{prefix}h.{layer}.ln_1", False),
        "attention.o": ("{prefix}h.{layer}.attn.c_proj", True),
        "mlp_norm": ("{prefix}h.{layer}.ln_2", False),
        "mlp.up": ("{prefix}h.{layer}.mlp.c_fc", True),
        "mlp.down": ("{prefix}h.{layer}.mlp.c_proj", True),
        "final_norm": ("{prefix}ln_f", False),
        "head": ("lm_head", False),
    }
) | {
    f"attention.{part}.{kind}": Source(f"{{prefix}}h.{{layer}}.attn.c_attn.{kind}", kind == "weight", block, 3)
    for block, part in enumerate("qkv")
    for kind in ("weight", "bias")
}

_LLAMA = _pairs(
    {
        "embedding": ("{prefix}embed_tokens", False),
        "attention_norm": ("{prefix}layers.{layer}.input_layernorm", False),
        "attention.q": ("{prefix}layers.{layer}.self_attn.q_proj", False),
        "attention.k": ("{prefix}layers.{layer}.self_attn.k_proj", False),
        "attention.v": ("{prefix}layers.{layer}.self_attn.v_proj", False),
        "attention.q_norm": ("{prefix}layers.{layer}.self_attn.q_norm", False),
        "attention.k_norm": ("{prefix}layers.{layer}.self_attn.k_norm", False),
        "attention.o": ("{prefix}layers.{layer}.self_attn.o_proj", False),
        "mlp_norm": ("{prefix}layers.{layer}.post_attention_layernorm", False),
        "mlp.gate": ("{prefix}layers.{layer}.mlp.gate_proj", False),
        "mlp.up": ("{prefix}layers.{layer}.mlp.up_proj", False),
        "mlp.down": ("{prefix}layers.{layer}.mlp.down_proj", False),
        "final_norm": ("{prefix}norm", False),
        "head": ("lm_head", False),
    }
)


def _experts(router: str, expert: str, names: tuple[str, str, str], shared: str, shared_gate: str) -> dict[str, Source]:
    """The llama line with experts.

    Args:
        router, shared, shared_gate: where these stand in a layer.
        expert: likewise one expert, with `{expert}`.
        names: of its gate, up and down.
    """
    at, parts = "{prefix}layers.{layer}.", ("gate", "up", "down")
    rows = {f"mlp.experts.{ours}.weight": Source(f"{at}{expert}.{theirs}.weight") for ours, theirs in zip(parts, names)}
    rows |= {f"mlp.shared.{part}.weight": Source(f"{at}{shared}.{part}_proj.weight") for part in parts}
    rows["mlp.router.weight"] = Source(f"{at}{router}.weight")
    rows["mlp.router.noise.weight"] = Source(f"{at}{router}.noise.weight")
    rows["mlp.router.bias"] = Source(f"{at}{router}.e_score_correction_bias")
    rows["mlp.shared_gate.weight"] = Source(f"{at}{shared_gate}.weight")
    return _LLAMA | rows


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL = _experts(
    "block_sparse_moe.gate", "block_sparse_moe.experts.{expert}", ("w1", "w3", "w2"), "mlp.shared", "mlp.shared_gate"
)
_QWEN_MOE = _experts("mlp.gate", "mlp.experts.{expert}", _PROJECTIONS, "mlp.shared_expert", "mlp.shared_expert_gate")
_DEEPSEEK = _experts("mlp.gate", "mlp.experts.{expert}", _PROJECTIONS, "mlp.shared_experts", "mlp.shared_expert_gate")

_GPT2_MAP = NameMap(("transformer.", ""), MappingProxyType(_GPT2), (".attn.bias", ".attn.masked_bias"))


def _llama_map(rows: Mapping[str, Source], skips_further_layers: bool = False) -> NameMap:
    return NameMap(("model.", ""), MappingProxyType(dict(rows)), (".rotary_emb.inv_freq",), skips_further_layers)


def _latent_rows(query: str) -> dict[str, Source]:
    """DeepSeek-V2 and V3; `query` is what projects to the heads' queries."""
    at, names = (
        "{prefix}layers.{layer}.self_attn.",
        {
            "attention.latents.q": "q_a_proj",
            "attention.latents.q_norm": "q_a_layernorm",
            "attention.latents.kv": "kv_a_proj_with_mqa",
            "attention.latents.kv_norm": "kv_a_layernorm",
            "attention.q": query,
            "attention.kv": "kv_b_proj",
        },
    )
    return _DEEPSEEK | _pairs({ours: (at + theirs, False) for ours, theirs in names.items()})


_LLAMA_MAP = _llama_map(_LLAMA)
_LATENT_MAP = _llama_map(_latent_rows("q_b_proj"), skips_further_layers=True)
_PLAIN_QUERY_MAP = _llama_map(_latent_rows("q_proj"), skips_further_layers=True)
"""Without a latent of queries."""
_MIXTURE = _latent_rows("q_b_proj") | _DEEPSEEK | _pairs({"positions": ("{prefix}embed_positions", False)})
"""Biases and learned positions too, for what has no class elsewhere."""

NAME_MAPS: Mapping[str, NameMap] = MappingProxyType(
    {
        "gpt2": _GPT2_MAP,
        "llama": _LLAMA_MAP,
        "mistral": _LLAMA_MAP,
        "qwen2": _LLAMA_MAP,
        "qwen3": _LLAMA_MAP,
        "mixtral": _llama_map(_MIXTRAL),
        "qwen2_moe": _llama_map(_QWEN_MOE),
        "qwen3_moe": _llama_map(_QWEN_MOE),
        "deepseek": _llama_map(_DEEPSEEK),
        "deepseek_v2": _LATENT_MAP,
        "deepseek_v3": _LATENT_MAP,
        "dots1": _llama_map(_DEEPSEEK),
        "mixture": _llama_map(_MIXTURE),
    }
)


def name_map(spec: ModelSpec) -> NameMap:
    """The family's map. Raises UnsupportedError where there is none."""
    if spec.family not in NAME_MAPS:
        known = ", ".join(NAME_MAPS)
        raise UnsupportedError(
            f"`{spec.name}`: weights of the {spec.family} family are not read or written ({known} are)"
        )
    found = NAME_MAPS[spec.family]
    return _PLAIN_QUERY_MAP if found is _LATENT_MAP and spec.latent and not spec.latent.q_lora_rank else found
