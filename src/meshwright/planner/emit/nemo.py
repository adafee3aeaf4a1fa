"""NeMo 2.0: a Python file with its strategy, trainer and data. Source: NeMo Framework user guide, parallelisms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.core.plan import Plan
from meshwright.planner.emit.common import Emitted, left_out, why_experts

TOOL = "NeMo"
PRECISIONS = {"fp32": "32", "bf16": "bf16-mixed", "fp16": "16-mixed"}
ALWAYS = ("dp", "tp", "pp", "micro_batch_size", "num_micro_batches")


def emit(plan: Plan) -> Emitted:
    """`nemo_plan.py`: `strategy`, `trainer` and `data`, to be used with a recipe of the model."""
    s, cluster, job = plan.strategy, plan.cluster, plan.job
    said = set(ALWAYS)
    arguments: dict[str, Any] = {
        "tensor_model_parallel_size": s.tp,
        "pipeline_model_parallel_size": s.pp,
        "virtual_pipeline_model_parallel_size": s.stages_per_rank if s.stages_per_rank > 1 else None,
        "context_parallel_size": s.context.degree,
        "sequence_parallel": s.sequence == "megatron",
    }
    said.add("sequence")
    if s.schedule in ("1f1b", "interleaved-1f1b"):
        said |= {"schedule", "num_chunks"}
    if s.context.kind == "ring" and s.context.balance == "zigzag":
        said.add("context")
    ddp: dict[str, Any] = {}
    if s.zero == 1:
        ddp = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    if s.zero <= 1:
        said.add("zero")
    plugins = f"nl.MegatronMixedPrecision(precision={PRECISIONS.get(s.precision, '32')!r})"
    said |= {"precision"} if s.precision in PRECISIONS else set()
    text = _TEXT.format(
        strategy=_call("nl.MegatronStrategy", {**arguments, "ddp": _Code(_call("DistributedDataParallelConfig", ddp))}),
        trainer=_call(
            "nl.Trainer",
            {
                "devices": cluster.devices_per_node,
                "num_nodes": cluster.num_nodes,
                "accelerator": "cpu" if cluster.backend == "gloo" else "gpu",
                "strategy": _Code("strategy"),
                "plugins": _Code(plugins),
            },
        ),
        data=_call(
            "llm.MockDataModule",
            {
                "seq_length": job.seq_length,
                "micro_batch_size": s.micro_batch_size,
                "global_batch_size": job.global_batch_size,
            },
        ),
    )
    return Emitted(
        {"nemo_plan.py": text}, (*left_out(plan, TOOL, said, WHY | why_experts(plan, EXPERTS)), *_notes(plan))
    )


EXPERTS = "set expert_model_parallel_size on the strategy"
"""What to know of ranks that share experts."""
WHY = {
    "dropout": "set `hidden_dropout` on the model's config",
    "attention_dropout": "set `attention_dropout` on the model's config",
    "zero": "NeMo's Megatron strategy divides the optimizer's states; its FSDP strategies are other classes",
    "recompute": "set `recompute_granularity`, `recompute_method` and `recompute_num_layers` on the model's config",
    "layers_per_stage": "set the layers of the first and last stage on the model's config",
}
_TEXT = """from megatron.core.distributed import DistributedDataParallelConfig
from nemo import lightning as nl
from nemo.collections import llm

strategy = {strategy}
trainer = {trainer}
data = {data}
"""


class _Code(str):
    """Written as it is, not as a string."""


def _call(name: str, arguments: dict[str, Any]) -> str:
    if not arguments:
        return f"{name}()"
    written = {key: value if isinstance(value, _Code) else repr(value) for key, value in arguments.items()}
    lines = (f"{key}={value},".replace("\n", "\n    ") for key, value in written.items())
    return f"{name}(\n" + "".join(f"    {line}\n" for line in lines) + ")"


def _notes(plan: Plan) -> Iterator[str]:
    yield f"model: `{plan.model.name}` and {plan.job.optimizer} come from a recipe in `nemo.collections.llm`"
