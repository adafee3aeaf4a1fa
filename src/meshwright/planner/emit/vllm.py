"""vLLM: the layout of the weights, for serving them. Source: vLLM's engine arguments."""

from __future__ import annotations

from meshwright.core.plan import Plan
from meshwright.core.serving import ServingPlan
from meshwright.planner.emit.common import Emitted, Flags, command_line, left_out, script

TOOL = "vLLM"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
TRAINING = "of training only, nothing that vLLM serves with"
OF_TRAINING = (
    "zero",
    "shard_over",
    "keep_gathered",
    "reduce_each",
    "prefetch",
    "bucket_bytes",
    "micro_batch_size",
    "num_micro_batches",
    "schedule",
    "num_chunks",
    "recompute",
    "recompute_layers",
    "recompute_group",
    "dropout",
    "attention_dropout",
    "label_smoothing",
    "label_smoothing_rule",
    "z_loss",
)

WHY = {
    "expert": "vLLM has --enable-expert-parallel, over the ranks of tp and dp",
    **dict.fromkeys(OF_TRAINING, TRAINING),
}


def emit(plan: Plan) -> Emitted:
    """The `vllm serve` command, for the model's folder in the place of `MODEL`."""
    s = plan.strategy
    flags: Flags = {"--tensor-parallel-size": s.tp, "--pipeline-parallel-size": s.pp}
    if s.dp > 1:
        flags["--data-parallel-size"] = s.dp
    said = {"dp", "tp", "pp"}
    if (dtype := DTYPES.get(s.recipe.parameter)) is not None:
        flags["--dtype"] = dtype
        said.add("precision")
    flags["--max-model-len"] = min(plan.job.seq_length, plan.model.max_positions)
    if plan.cluster.num_nodes > 1 and plan.strategy.tp * plan.strategy.pp > plan.cluster.devices_per_node:
        flags["--distributed-executor-backend"] = "ray"
    cut = ",".join(map(str, s.layers_per_stage or ()))
    words = [*([f"VLLM_PP_LAYER_PARTITION={cut}"] if cut else []), "vllm serve", '"$MODEL"']
    said.add("layers_per_stage")
    text = script(command_line(words, flags))
    return Emitted({"vllm.sh": text}, tuple(left_out(plan, TOOL, said, WHY)))


def emit_serving(plan: ServingPlan) -> Emitted:
    """Likewise of a plan for serving, with the sizes of its engine."""
    layout, requests, cluster = plan.layout, plan.requests, plan.cluster
    flags: Flags = {"--tensor-parallel-size": layout.tp, "--pipeline-parallel-size": layout.pp}
    notes = [f"requests of {requests.length} tokens at {requests.rate_per_s:g} per second: not a choice of vLLM's"]
    if layout.replicas > 1:
        flags["--data-parallel-size"] = layout.replicas
    if layout.ep > 1:
        flags["--enable-expert-parallel"] = None
        whole = layout.replicas * layout.tp
        notes.append(f"ep={layout.ep}: vLLM spreads whole experts over all {whole} ranks of tp and replicas")
    recipe = layout.replica.recipe
    if (dtype := DTYPES.get(recipe.parameter)) is not None:
        flags["--dtype"] = dtype
    else:
        notes.append(f"precision={layout.precision}: {TOOL} has no such choice")
    flags["--max-model-len"] = requests.length
    flags["--max-num-seqs"] = layout.max_running
    flags["--max-num-batched-tokens"] = layout.step_tokens
    flags["--block-size"] = layout.block_size
    flags["--num-gpu-blocks-override"] = layout.num_blocks
    flags["--gpu-memory-utilization"] = f"{cluster.usable_memory_fraction:.4g}"
    if layout.tp * layout.pp > cluster.devices_per_node:
        flags["--distributed-executor-backend"] = "ray"
    if layout.pp > 1:
        notes.append(f"pp={layout.pp}: vLLM has several steps under way in a pipeline, the forecast one")
    cut = ",".join(map(str, layout.layers_per_stage or ()))
    words = [*([f"VLLM_PP_LAYER_PARTITION={cut}"] if cut else []), "vllm serve", '"$MODEL"']
    return Emitted({"vllm.sh": script(command_line(words, flags))}, tuple(notes))
