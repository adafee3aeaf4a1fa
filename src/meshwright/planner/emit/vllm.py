"""vLLM: the layout of the weights, for serving them. Source: vLLM's engine arguments."""

from __future__ import annotations

from meshwright.core.plan import Plan
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
