"""Megatron-LM: flags of `pretrain_gpt.py`. Source: its `megatron/training/arguments.py` and user guide, 2026."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.core.latent import YarnScaling
from meshwright.core.model import ModelSpec
from meshwright.core.plan import Plan
from meshwright.core.strategy import Strategy
from meshwright.planner.emit.common import Emitted, Flags, command_line, left_out, script, torchrun_words

TOOL = "Megatron-LM"
COMM_TYPES = {"ring": "p2p", "ulysses": "a2a"}
PRECISIONS: dict[str, Flags] = {
    "fp32": {},
    "bf16": {"--bf16": None},
    "bf16-16": {"--bf16": None, "--grad-reduce-in-bf16": None},
    "fp16": {"--fp16": None, "--accumulate-allreduce-grads-in-fp32": None},
    "fp16-16": {"--fp16": None},
}
WHY = {
    "expert": "set --expert-model-parallel-size and --expert-tensor-parallel-size with the other flags of mixtures",
}
ALWAYS = ("dp", "tp", "pp", "micro_batch_size", "num_micro_batches", "zero", "dropout", "attention_dropout")


def emit(plan: Plan) -> Emitted:
    """The command that starts the same layout of the same model; paths of data and tokenizer are left to the user."""
    s = plan.strategy
    flags: Flags = {
        "--tensor-model-parallel-size": s.tp,
        "--pipeline-model-parallel-size": s.pp,
        "--micro-batch-size": s.micro_batch_size,
        "--global-batch-size": plan.job.global_batch_size,
        "--seq-length": plan.job.seq_length,
        "--optimizer": "adam" if plan.job.optimizer == "adamw" else "sgd",
    }
    said = set(ALWAYS)
    for part in (_sequences, _schedule, _zero, _recompute, _precision, _offload):
        more, fields = part(plan)
        flags |= more
        said |= fields
    flags |= _model(plan.model)
    flags |= {"--attention-dropout": f"{plan.job.attention_dropout:g}", "--hidden-dropout": f"{plan.job.dropout:g}"}
    text = script(command_line([*torchrun_words(plan), "pretrain_gpt.py"], flags))
    return Emitted({"megatron.sh": text}, (*left_out(plan, TOOL, said, WHY), *_notes(plan)))


Part = tuple[Flags, set[str]]
"""Flags, and the fields of a strategy that they say."""


def _sequences(plan: Plan) -> Part:
    """Sequence parallelism of norms, and context parallelism, which Megatron always balances in zigzag."""
    s, flags, said = plan.strategy, Flags(), set[str]()
    if s.sequence == "megatron":
        flags["--sequence-parallel"] = None
        said.add("sequence")
    if s.context.degree > 1 and s.context.kind in COMM_TYPES and s.context.balance == "zigzag":
        flags |= {"--context-parallel-size": s.context.degree, "--cp-comm-type": COMM_TYPES[s.context.kind]}
        said.add("context")
    return flags, said


def _schedule(plan: Plan) -> Part:
    s, flags, said = plan.strategy, Flags(), set[str]()
    if s.schedule in ("1f1b", "interleaved-1f1b"):
        said |= {"schedule", "num_chunks"}
        if s.stages_per_rank > 1:
            flags["--num-virtual-stages-per-pipeline-rank"] = s.stages_per_rank
        parts = [len(layers) for layers in s.stage_layers(plan.model.num_layers)[: s.num_parts]]
        if len(set(parts)) > 1:
            flags["--pipeline-model-parallel-layout"] = "E" + "|".join("t" * number for number in parts) + "L"
        said.add("layers_per_stage")
    return flags, said


def _zero(plan: Plan) -> Part:
    s, flags, said = plan.strategy, Flags(), {"bucket_bytes"}
    if s.zero:
        flags["--use-distributed-optimizer"] = None
    if s.zero == 1:
        flags |= {"--overlap-grad-reduce": None, "--overlap-param-gather": None}
    if s.zero >= 2:
        strategy = "optim_grads" if s.zero == 2 else "optim_grads_params"
        flags |= {"--use-megatron-fsdp": None, "--data-parallel-sharding-strategy": strategy}
        flags |= {"--no-gradient-accumulation-fusion": None, "--ckpt-format": "fsdp_dtensor"}
    if s.bucket_bytes != Strategy.model_fields["bucket_bytes"].default:
        flags["--ddp-bucket-size"] = s.bucket_bytes // s.recipe.gradient_bytes
    if s.shard_over == "node":
        flags["--num-distributed-optimizer-instances"] = s.data_ranks // s.dp_local
        said.add("shard_over")
    return flags, said


def _recompute(plan: Plan) -> Part:
    s = plan.strategy
    if s.recompute == "none":
        return {}, {"recompute"}
    if s.recompute == "selective":
        return {"--recompute-granularity": "selective", "--recompute-modules": "core_attn"}, {"recompute"}
    flags: Flags = {"--recompute-granularity": "full"}
    if s.recompute_layers is None:
        flags |= {"--recompute-method": "uniform", "--recompute-num-layers": s.recompute_group}
        return flags, {"recompute", "recompute_group"}
    flags |= {"--recompute-method": "block", "--recompute-num-layers": s.recompute_layers}
    return flags, {"recompute", "recompute_layers"}


def _precision(plan: Plan) -> Part:
    flags = PRECISIONS.get(plan.strategy.precision)
    return ({}, set()) if flags is None else (flags, {"precision"})


def _offload(plan: Plan) -> Part:
    """The optimizer's states to the host; of more, the whole choice is told as not expressed."""
    offload = plan.strategy.offload
    if offload.model_dump(exclude_defaults=True) != {"optimizer": "cpu"}:
        return {}, set()
    return {"--optimizer-cpu-offload": None, "--use-precision-aware-optimizer": None}, {"offload"}


def _model(model: ModelSpec) -> Flags:
    positions = {"learned": "learned_absolute", "rope": "rope", "alibi": "none"}[model.positions]
    flags: Flags = {
        "--num-layers": model.num_layers,
        "--hidden-size": model.hidden_size,
        "--ffn-hidden-size": model.ffn_size,
        "--num-attention-heads": model.num_heads,
        "--kv-channels": model.head_dim,
        "--max-position-embeddings": model.max_positions,
        "--position-embedding-type": positions,
        "--normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "--norm-epsilon": f"{model.norm_eps:g}",
        "--vocab-size": model.vocab_size,
    }
    if model.num_kv_heads != model.num_heads:
        flags |= {"--group-query-attention": None, "--num-query-groups": model.num_kv_heads}
    if model.positions == "rope":
        flags["--rotary-base"] = f"{model.rope_theta:.0f}"
    chosen = {
        "--swiglu": model.gated_mlp and model.activation == "silu",
        "--untie-embeddings-and-output-weights": not model.tied_embeddings,
        "--disable-bias-linear": not model.mlp_bias,
        "--add-qkv-bias": model.qkv_bias and not model.mlp_bias,
        "--qk-layernorm": model.qk_norm,
    }
    return flags | {flag: None for flag, is_chosen in chosen.items() if is_chosen} | _latent(model)


def _latent(model: ModelSpec) -> Flags:
    """Multi-head latent attention, by the sizes of its heads."""
    latent, scaling = model.latent, model.rope_scaling
    if latent is None:
        return {}
    ranks: Flags = {"--q-lora-rank": latent.q_lora_rank} if latent.q_lora_rank else {}
    factors: Flags = {}
    if isinstance(scaling, YarnScaling):
        factors = {"--rotary-scaling-factor": f"{scaling.factor:g}"}
        factors |= {"--mscale": f"{scaling.mscale:g}"} if scaling.mscale else {}
        factors |= {"--mscale-all-dim": f"{scaling.mscale_all_dim:g}"} if scaling.mscale_all_dim else {}
    return {
        "--multi-latent-attention": None,
        "--qk-layernorm": None,  # of its latents
        **ranks,
        "--kv-lora-rank": latent.kv_lora_rank,
        "--qk-head-dim": latent.qk_nope_head_dim,
        "--qk-pos-emb-head-dim": latent.qk_rope_head_dim,
        "--v-head-dim": latent.v_head_dim,
        **factors,
    }


def _notes(plan: Plan) -> Iterator[str]:
    model = plan.model
    if model.positions == "alibi":
        yield "model: Megatron-LM has no ALiBi positions"
    if model.rope_scaling is not None and model.latent is None:
        yield "model: the scaling of its rotary positions; add --use-rope-scaling and its factor"
    if model.num_experts:
        yield "model: its experts; add --num-experts and the other flags of mixtures"
    if model.sliding_window is not None:
        yield f"model: its window of {model.sliding_window} tokens; add --window-size"
