"""Flags of other tools by their documented names, for parsing what is emitted. None: a flag without a value."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping

Table = Mapping[str, type | None]

MEGATRON: Table = {
    **dict.fromkeys(
        (
            "--tensor-model-parallel-size",
            "--pipeline-model-parallel-size",
            "--num-virtual-stages-per-pipeline-rank",
            "--context-parallel-size",
            "--micro-batch-size",
            "--global-batch-size",
            "--seq-length",
            "--recompute-num-layers",
            "--ddp-bucket-size",
            "--num-distributed-optimizer-instances",
            "--num-layers",
            "--hidden-size",
            "--ffn-hidden-size",
            "--num-attention-heads",
            "--num-query-groups",
            "--kv-channels",
            "--max-position-embeddings",
            "--rotary-base",
            "--vocab-size",
            "--q-lora-rank",
            "--kv-lora-rank",
            "--qk-head-dim",
            "--qk-pos-emb-head-dim",
            "--v-head-dim",
        ),
        int,
    ),
    **dict.fromkeys(("--rotary-scaling-factor", "--mscale", "--mscale-all-dim"), float),
    **dict.fromkeys(("--norm-epsilon", "--attention-dropout", "--hidden-dropout"), float),
    **dict.fromkeys(
        (
            "--optimizer",
            "--cp-comm-type",
            "--pipeline-model-parallel-layout",
            "--data-parallel-sharding-strategy",
            "--ckpt-format",
            "--recompute-granularity",
            "--recompute-method",
            "--recompute-modules",
            "--position-embedding-type",
            "--normalization",
        ),
        str,
    ),
    **dict.fromkeys(
        (
            "--sequence-parallel",
            "--use-distributed-optimizer",
            "--overlap-grad-reduce",
            "--overlap-param-gather",
            "--use-megatron-fsdp",
            "--no-gradient-accumulation-fusion",
            "--optimizer-cpu-offload",
            "--use-precision-aware-optimizer",
            "--bf16",
            "--fp16",
            "--grad-reduce-in-bf16",
            "--accumulate-allreduce-grads-in-fp32",
            "--group-query-attention",
            "--swiglu",
            "--untie-embeddings-and-output-weights",
            "--disable-bias-linear",
            "--add-qkv-bias",
            "--qk-layernorm",
            "--multi-latent-attention",
        ),
        None,
    ),
}

TORCHTITAN: Table = {
    **dict.fromkeys(
        (
            "--parallelism.data_parallel_replicate_degree",
            "--parallelism.data_parallel_shard_degree",
            "--parallelism.tensor_parallel_degree",
            "--parallelism.pipeline_parallel_degree",
            "--parallelism.context_parallel_degree",
            "--parallelism.pipeline_parallel_microbatch_size",
            "--parallelism.pipeline_parallel_layers_per_stage",
            "--parallelism.pipeline_parallel_first_stage_less_layers",
            "--parallelism.pipeline_parallel_last_stage_less_layers",
            "--training.seq_len",
            "--training.local_batch_size",
            "--training.global_batch_size",
        ),
        int,
    ),
    **dict.fromkeys(
        (
            "--parallelism.fsdp_reshard_after_forward",
            "--parallelism.pipeline_parallel_schedule",
            "--parallelism.context_parallel_rotate_method",
            "--training.mixed_precision_param",
            "--training.mixed_precision_reduce",
            "--activation_checkpoint.mode",
        ),
        str,
    ),
    "--training.enable_cpu_offload": None,
}

VLLM: Table = {
    **dict.fromkeys(
        (
            "--tensor-parallel-size",
            "--pipeline-parallel-size",
            "--data-parallel-size",
            "--max-model-len",
            "--max-num-seqs",
            "--max-num-batched-tokens",
            "--block-size",
            "--num-gpu-blocks-override",
        ),
        int,
    ),
    "--gpu-memory-utilization": float,
    "--enable-expert-parallel": None,
    **dict.fromkeys(("--dtype", "--distributed-executor-backend"), str),
}

SBATCH = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "exclusive"}

NEMO = {
    "nl.MegatronStrategy": {
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "sequence_parallel",
        "ddp",
    },
    "DistributedDataParallelConfig": {"use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"},
    "nl.Trainer": {"devices", "num_nodes", "accelerator", "strategy", "plugins"},
    "nl.MegatronMixedPrecision": {"precision"},
    "llm.MockDataModule": {"seq_length", "micro_batch_size", "global_batch_size"},
}


def words_of(script: str) -> list[str]:
    """The words of a script's last command."""
    return shlex.split(script.replace("\\\n", " ").strip().splitlines()[-1])


def parse(table: Table, words: list[str]) -> argparse.Namespace:
    """Flags as the tool would read them. Exits for one that it has not, or a value of another type."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag, kind in table.items():
        dest = flag.removeprefix("--").rpartition(".")[2].replace("-", "_")
        if kind is None:
            parser.add_argument(flag, dest=dest, action="store_true")
        else:
            parser.add_argument(flag, dest=dest, type=kind)
    return parser.parse_args(words)
