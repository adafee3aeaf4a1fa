"""A tiny model, plans for it, and training runs of it on the test pool's ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.plan import Plan
from meshwright.core.sources import load_cluster, load_model
from meshwright.core.strategy import Strategy
from meshwright.run.folder import RunFolder
from meshwright.run.options import TrainOptions
from meshwright.run.set_up import set_up

SEQ_LENGTH, BATCH = 32, 8
TEXT_BYTES = 60_000
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "initializer_range": 0.1, "tie_word_embeddings": False,
}  # fmt: skip


def write_config(folder: Path, **changes: Any) -> Path:
    """The model's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    return path


def tiny_model(folder: Path) -> ModelSpec:
    """As read from its config.json."""
    return load_model(str(write_config(folder)))


def make_plan(
    model: ModelSpec, dp: int = 1, tp: int = 1, pp: int = 1, *, zero: int = 0, micro: int = 2, kind: str = "1d"
) -> Plan:
    """A plan in fp32 whose batch has `BATCH` sequences, cut into `micro` micro-batches."""
    split = Strategy.parse(
        {"dp": dp, "tp": tp, "pp": pp, "zero": zero, "num_micro_batches": micro,
         "micro_batch_size": BATCH // dp // micro, "tensor": {"kind": kind}}, "strategy"
    )  # fmt: skip
    job = Job(seq_length=SEQ_LENGTH, global_batch_size=BATCH)
    return Plan(model=model, cluster=load_cluster(f"local:{split.world_size}"), job=job, strategy=split)


def make_run(plan: Plan, options: TrainOptions, folder: Path, *, resume: bool = False) -> RunFolder:
    """What the command does before it starts ranks."""
    run = RunFolder(folder)
    set_up(plan, options, run, resume=resume)
    return run


def options(steps: int, **changes: Any) -> TrainOptions:
    """Of a short run on a little of the standard library."""
    return TrainOptions(steps=steps, max_text_bytes=TEXT_BYTES, learning_rate=0.01, eval_samples=8, **changes)


def train_rank(rank: int, world: int, folder: Path, plan: Plan, resume: bool, stop_after: int | None) -> None:
    """One rank of the run in `folder` by `plan`; it may stop after a checkpoint, as if it were killed there."""
    from meshwright.run.training import Training

    class Stop(Exception):
        pass

    class Interrupted(Training):
        def save(self, step: int) -> None:
            super().save(step)
            if step == stop_after:
                raise Stop

    run = RunFolder(folder)
    try:
        Interrupted(plan, run.options(), run).run(resume=resume)
    except Stop:
        assert stop_after is not None
