"""Accelerate: the file that `accelerate launch --config_file` reads. Source: accelerate 1.15, `commands/launch.py`.

Without a pipeline FSDP2 and its `parallelism_config` do the work; with one Megatron-LM does, which accelerate starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.core.plan import Plan
from meshwright.core.strategy import Strategy
from meshwright.planner.emit.common import Emitted, left_out, why_experts

TOOL = "Accelerate"
PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
ALWAYS = ("dp", "tp", "zero")
ROTATE = {"ring": "alltoall"}


def emit(plan: Plan) -> Emitted:
    """`accelerate.yaml`, with the script left to the user."""
    s, cluster = plan.strategy, plan.cluster
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "machine_rank": 0,
        "num_machines": cluster.num_nodes,
        "num_processes": cluster.num_devices,
        "main_process_port": 29500,
        "mixed_precision": PRECISIONS.get(s.precision, "no"),
        "use_cpu": cluster.backend == "gloo",
    }
    said = {*ALWAYS, *(("precision",) if s.precision in PRECISIONS else ())}
    if s.pp > 1:
        config |= _megatron(s)
        said |= {"pp", "num_micro_batches", "sequence"}
        said |= {"recompute"} if s.recompute == "selective" else set()
        said |= {"schedule"} if s.schedule == "1f1b" else set()
    elif s.zero or s.tp > 1 or s.context.degree > 1:
        config |= _fsdp(s)
        said |= _fsdp_said(s)
    else:
        config["distributed_type"] = "MULTI_CPU" if config["use_cpu"] else "MULTI_GPU"
    return Emitted(
        {"accelerate.yaml": _yaml(config)},
        (*left_out(plan, TOOL, said, WHY | why_experts(plan, EXPERTS)), *_notes(plan)),
    )


EXPERTS = "it is not a part of its file"
"""What to know of ranks that share experts."""
WHY = {
    **dict.fromkeys(
        ("dropout", "attention_dropout", "label_smoothing", "label_smoothing_rule", "z_loss"), "it is the script's"
    ),
    "micro_batch_size": "it is the batch size of the script's DataLoader",
    "num_micro_batches": "start with `accelerate launch --gradient_accumulation_steps`, or set it in the script",
    "layers_per_stage": "Megatron-LM cuts evenly, as Accelerate starts it",
    "recompute": "the script decides, as with `model.gradient_checkpointing_enable()`",
}


def _fsdp(s: Strategy) -> dict[str, Any]:
    degree = s.context.degree
    replicas = {0: s.dp}.get(s.zero, s.data_ranks // s.dp_local if s.shard_over == "node" else 1)
    prefix = "parallelism_config_"
    parallelism: dict[str, Any] = {
        f"{prefix}dp_replicate_size": replicas,
        f"{prefix}dp_shard_size": s.dp // replicas,
        f"{prefix}tp_size": s.tp,
        f"{prefix}cp_size": degree,
    }
    if degree > 1:
        parallelism[f"{prefix}cp_comm_strategy"] = ROTATE.get(s.context.kind, "allgather")
    return {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": s.zero == 3 and not s.keep_gathered,
            "fsdp_offload_params": s.offload.tiers == ("cpu", "cpu", "cpu"),
            "fsdp_activation_checkpointing": s.recompute == "full",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
        "parallelism_config": parallelism,
    }


def _fsdp_said(s: Strategy) -> set[str]:
    said = {"shard_over", "keep_gathered"}
    said |= {"recompute"} if s.recompute in ("none", "full") else set()
    states = s.offload.model_dump(include={"optimizer", "parameters", "gradients", "delayed", "activations"})
    whole = {**dict.fromkeys(("optimizer", "parameters", "gradients"), "cpu"), "delayed": False, "activations": "none"}
    said |= {"offload"} if states == whole else set()
    return said | ({"context"} if s.context.kind in ROTATE and s.context.balance == "zigzag" else set())


def _megatron(s: Strategy) -> dict[str, Any]:
    prefix = "megatron_lm_"
    return {
        "distributed_type": "MEGATRON_LM",
        "megatron_lm_config": {
            f"{prefix}tp_degree": s.tp,
            f"{prefix}pp_degree": s.pp,
            f"{prefix}num_micro_batches": s.num_micro_batches,
            f"{prefix}sequence_parallelism": s.sequence == "megatron",
            f"{prefix}recompute_activations": s.recompute == "selective",
            f"{prefix}use_distributed_optimizer": s.zero > 0,
        },
    }


def _notes(plan: Plan) -> Iterator[str]:
    s = plan.strategy
    if s.pp > 1 and s.zero > 1:
        yield f"zero={s.zero} with pp={s.pp}: Accelerate's Megatron-LM divides the optimizer's states only (stage 1)"
    if s.pp == 1 and s.zero in (1, 2):
        yield f"zero={s.zero}: FSDP2 divides parameters too between steps; kept gathered within one, as written here"
    if s.pp == 1 and s.zero == 0 and s.tp > 1 and s.dp > 1:
        yield "zero=0 with tp: replicas beside tensor parallelism, which Accelerate asks to be sharded (zero=3)"
    if plan.cluster.num_nodes > 1:
        yield "nodes: set machine_rank and main_process_ip on each of them"
    yield f"model: `{plan.model.name}`, its sequences and its optimizer ({plan.job.optimizer}) are the script's"


def _yaml(config: dict[str, Any], indent: str = "") -> str:
    lines = []
    for name, value in config.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{name}:\n{_yaml(value, indent + '  ')}")
        else:
            shown = str(value).lower() if isinstance(value, bool) else f"'{value}'" if value == "no" else value
            lines.append(f"{indent}{name}: {shown}\n")
    return "".join(lines)
