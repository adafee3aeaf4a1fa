"""DeepSpeed: its configuration file, and the command that starts it. Source: DeepSpeed 0.19, `runtime/config.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from meshwright.core.plan import Plan
from meshwright.core.strategy import Strategy
from meshwright.planner.emit.common import Emitted, left_out, script, why_experts

TOOL = "DeepSpeed"
GRADIENTS = {"bf16": "fp32", "bf16-16": "bf16", "fp16": "fp32", "fp16-16": "fp16"}
"""Precision → the dtype in which gradients add up."""
DEVICES = {"cpu": "cpu", "disk": "nvme"}
ALWAYS = ("dp", "tp", "micro_batch_size", "num_micro_batches", "zero", "bucket_bytes")


def emit(plan: Plan) -> Emitted:
    """`ds_config.json`, for a script that calls `deepspeed.initialize`."""
    s = plan.strategy
    config: dict[str, Any] = {
        "train_batch_size": plan.job.global_batch_size,
        "train_micro_batch_size_per_gpu": s.micro_batch_size,
        "gradient_accumulation_steps": s.num_micro_batches,
        "zero_optimization": _zero(s),
        "optimizer": {"type": "AdamW" if plan.job.optimizer == "adamw" else "SGD"},
    }
    said = set(ALWAYS)
    if s.precision in GRADIENTS:
        config[s.precision.partition("-")[0]] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": GRADIENTS[s.precision]}
        said.add("precision")
    if s.tp > 1:
        config["tensor_parallel"] = {"autotp_size": s.tp}
    if s.pp > 1:
        config["pipeline"] = {"stages": s.pp, "partition": "uniform"}
        config["pipeline"] |= {"activation_checkpoint_interval": s.recompute_group} if s.recompute == "full" else {}
        said |= {"pp", *(("recompute", "recompute_group") if s.recompute == "full" else ())}
    if s.schedule == "1f1b":
        said.add("schedule")
    said |= _offload_said(s)
    files = {
        "ds_config.json": json.dumps(config, indent=2) + "\n",
        "deepspeed.sh": script(
            f"deepspeed --num_nodes {plan.cluster.num_nodes} --num_gpus {plan.cluster.devices_per_node} \\\n"
            "  train.py --deepspeed --deepspeed_config ds_config.json\n"
        ),
    }
    return Emitted(files, (*left_out(plan, TOOL, said, WHY | why_experts(plan, EXPERTS)), *_notes(plan)))


EXPERTS = "DeepSpeed's MoE layer takes it as ep_size in the script"
"""What to know of ranks that share experts."""
WHY = {
    **dict.fromkeys(
        ("dropout", "attention_dropout", "label_smoothing", "label_smoothing_rule", "z_loss"), "it is the script's"
    ),
    "recompute": "wrap the layers in `deepspeed.checkpointing.checkpoint`",
    "shard_over": "DeepSpeed shards over all ranks; its MiCS and hpZ are set up otherwise",
    "keep_gathered": "DeepSpeed decides by stage3_max_reuse_distance and stage3_max_live_parameters, in elements",
    "prefetch": "DeepSpeed prefetches by stage3_prefetch_bucket_size, in elements",
    "layers_per_stage": "DeepSpeed cuts layers uniformly, by parameters, or by type",
    "schedule": "DeepSpeed's pipeline runs 1F1B",
    "context": "DeepSpeed's Ulysses is set up in the script",
}


def _zero(s: Strategy) -> dict[str, Any]:
    numel = s.bucket_bytes // s.recipe.sent_gradient_bytes
    zero: dict[str, Any] = {"stage": s.zero, "overlap_comm": True, "contiguous_gradients": True}
    zero["reduce_bucket_size"] = numel
    for field, tier in (("offload_optimizer", s.offload.optimizer), ("offload_param", s.offload.parameters)):
        if tier != "none":
            at = {"nvme_path": s.offload.path} if tier == "disk" else {}
            zero[field] = {"device": DEVICES[tier], "pin_memory": True, **at}
    if s.offload.moves_states and s.zero == 3:
        zero["sub_group_size"] = s.offload.group_numel
    return zero


def _offload_said(s: Strategy) -> set[str]:
    """Gradients go to the host where the optimizer does, with stages 2 and 3; a delay is not a choice here."""
    offload = s.offload
    follows = offload.gradients == "none" or (offload.gradients == offload.optimizer == "cpu")
    groups = offload.group_numel == type(offload).model_fields["group_numel"].default or s.zero == 3
    says = follows and groups and not offload.delayed and not offload.moves_activations
    return {"offload"} if says else set()


def _notes(plan: Plan) -> Iterator[str]:
    s = plan.strategy
    if s.pp > 1:
        yield f"pp={s.pp}: the script builds a `PipelineModule(layers, num_stages={s.pp})`"
    if s.pp > 1 and s.zero >= 2:
        yield f"zero={s.zero} with pp={s.pp}: DeepSpeed's pipeline takes ZeRO stage 0 or 1"
    if s.pp > 1 and s.tp > 1:
        yield f"tp={s.tp} with pp={s.pp}: pass a topology to PipelineModule and split the layers in the script"
    if s.recompute != "none" and s.pp == 1 and s.recompute_group > 1:
        yield f"recompute_group={s.recompute_group}: wrap so many layers together"
    yield f"model: `{plan.model.name}` and sequences of {plan.job.seq_length} tokens are the script's"
