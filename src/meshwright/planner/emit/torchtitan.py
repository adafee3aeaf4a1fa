"""torchtitan: flags of `torchtitan.train`. Source: its `torchtitan/config/job_config.py`."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.core.plan import Plan
from meshwright.core.strategy import Strategy
from meshwright.planner.emit.common import Emitted, Flags, command_line, left_out, script, torchrun_words, why_experts

TOOL = "torchtitan"
SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved-1f1b": "Interleaved1F1B",
    "bfs": "LoopedBFS",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
PRECISIONS = {"fp32": ("float32", "float32"), "bf16": ("bfloat16", "float32"), "bf16-16": ("bfloat16", "bfloat16")}
"""Parameters that are computed with, and reductions; masters are fp32."""
ALWAYS = ("dp", "tp", "pp", "micro_batch_size", "num_micro_batches", "zero", "recompute")


def emit(plan: Plan) -> Emitted:
    """The command that starts the same layout; model and flavor are chosen by the user."""
    s = plan.strategy
    p, t = "--parallelism.", "--training."
    replicas, shards = _data_degrees(s)
    flags: Flags = {
        f"{p}data_parallel_replicate_degree": replicas,
        f"{p}data_parallel_shard_degree": shards,
        f"{p}tensor_parallel_degree": s.tp,
        f"{p}pipeline_parallel_degree": s.pp,
        f"{t}seq_len": plan.job.seq_length,
        f"{t}local_batch_size": s.micro_batch_size * (s.num_micro_batches if s.pp > 1 else 1),
        f"{t}global_batch_size": plan.job.global_batch_size,
        "--activation_checkpoint.mode": s.recompute,
    }
    said = {*ALWAYS, "keep_gathered"}
    if shards > 1:
        flags[f"{p}fsdp_reshard_after_forward"] = "always" if s.zero == 3 and not s.keeps_gathered else "never"
        said.add("shard_over")
    if s.pp > 1 and s.schedule in SCHEDULES:
        flags[f"{p}pipeline_parallel_schedule"] = SCHEDULES[s.schedule]
        flags[f"{p}pipeline_parallel_microbatch_size"] = s.micro_batch_size
        said |= {"schedule", *_layers(plan, flags)}
    if s.context.degree > 1 and s.context.kind == "ring" and s.context.balance == "zigzag":
        flags |= {f"{p}context_parallel_degree": s.context.degree, f"{p}context_parallel_rotate_method": "alltoall"}
        said.add("context")
    if s.precision in PRECISIONS:
        parameters, reductions = PRECISIONS[s.precision]
        flags |= {f"{t}mixed_precision_param": parameters, f"{t}mixed_precision_reduce": reductions}
        said.add("precision")
    if s.tp > 1 and s.sequence == "megatron":
        said.add("sequence")
    if (s.offload.tiers, s.offload.delayed) == (("cpu", "cpu", "cpu"), False):
        flags[f"{t}enable_cpu_offload"] = None
        said |= set() if s.offload.moves_activations else {"offload"}
    words = [*torchrun_words(plan), "-m torchtitan.train"]
    return Emitted(
        {"torchtitan.sh": script(command_line(words, flags))},
        (*left_out(plan, TOOL, said, WHY | why_experts(plan, EXPERTS)), *_notes(plan)),
    )


EXPERTS = "set --parallelism.expert_parallel_degree, where the model has experts"
"""What to know of ranks that share experts."""
WHY = {
    "layers_per_stage": "stages of different length are named module by module in torchtitan's model parts",
    "schedule": f"torchtitan runs {', '.join(SCHEDULES.values())}, or a table of its own form",
    "recompute_layers": "torchtitan recomputes all layers, or every so many",
}


def _data_degrees(s: Strategy) -> tuple[int, int]:
    """(replicas, shards) of the data-parallel ranks."""
    if s.zero == 0:
        return s.dp, 1
    if s.shard_over == "node":
        return s.data_ranks // s.dp_local, s.dp_local // s.context.degree
    return 1, s.dp


def _layers(plan: Plan, flags: Flags) -> set[str]:
    """Equal stages, which torchtitan finds by itself once the model's ends count for no layer."""
    s = plan.strategy
    parts = {len(layers) for layers in s.stage_layers(plan.model.num_layers)}
    if len(parts) > 1:
        return set()
    flags["--parallelism.pipeline_parallel_layers_per_stage"] = parts.pop()
    flags["--parallelism.pipeline_parallel_first_stage_less_layers"] = 0
    flags["--parallelism.pipeline_parallel_last_stage_less_layers"] = 0
    return {"layers_per_stage", "num_chunks"}


def _notes(plan: Plan) -> Iterator[str]:
    s = plan.strategy
    yield f"model: `{plan.model.name}` is chosen by --model.name and --model.flavor, where torchtitan has it"
    if s.zero in (1, 2) and s.dp > 1:
        yield f"zero={s.zero}: FSDP2 divides parameters too between steps; kept gathered within one, as written here"
    if s.tp > 1 and s.sequence == "none":
        yield "sequence=none: torchtitan's tensor parallelism always divides tokens between its layers"
    if s.recompute == "selective":
        yield "recompute=selective: torchtitan chooses by layer or operation, not attention's core alone"
    if plan.job.optimizer != "adamw":
        yield f"optimizer={plan.job.optimizer}: torchtitan has AdamW and Adam"
    parts = [len(part) for part in s.stage_layers(plan.model.num_layers)[: s.num_parts]]
    if s.layers_per_stage is None and len(set(parts)) > 1:
        yield f"stages of {', '.join(map(str, parts))} layers: {WHY['layers_per_stage']}"
