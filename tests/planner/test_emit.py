"""Plans as other tools take them: read back by their parsers or flags, and nothing left out in silence."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.emit import targets
from meshwright.cli.main import main
from meshwright.core.errors import InputError
from meshwright.core.job import Job
from meshwright.core.layouts import Expert
from meshwright.core.plan import Plan
from meshwright.core.sources import load_cluster, load_model
from meshwright.core.strategy import Strategy
from meshwright.planner.emit.common import FOLLOWS_FROM_CLUSTER, SAID_OF_JOB, Emitted, left_out
from tests.planner.tool_flags import MEGATRON, NEMO, SBATCH, TORCHTITAN, VLLM, parse, words_of

TARGETS = ("accelerate", "deepspeed", "megatron", "nemo", "slurm", "torchrun", "torchtitan", "vllm")

OTHERS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 4, "tp": 1},
    "tp": {"dp": 1, "tp": 4},
    "pp": {"dp": 1, "pp": 4},
    "zero": {"zero": 3},
    "shard_over": {"zero": 3, "shard_over": "node", "dp": 4, "pp": 1, "ranks_per_node": 4},
    "keep_gathered": {"zero": 3, "keep_gathered": True, "pp": 1},
    "reduce_each": {"zero": 2, "reduce_each": True},
    "prefetch": {"zero": 3, "prefetch": 3},
    "tile": {"tile": 2},
    "offload": {"zero": 1, "offload": {"optimizer": "cpu"}},
    "schedule": {"schedule": "zb-h1"},
    "num_chunks": {"schedule": "interleaved-1f1b", "num_chunks": 2},
    "micro_batch_size": {"micro_batch_size": 2},
    "num_micro_batches": {"num_micro_batches": 8},
    "recompute": {"recompute": "full"},
    "recompute_layers": {"recompute": "full", "recompute_layers": 3},
    "recompute_group": {"recompute": "full", "recompute_group": 2},
    "precision": {"precision": "fp16"},
    "layers_per_stage": {"layers_per_stage": (5, 27)},
    "bucket_bytes": {"bucket_bytes": 1 << 20},
    "sequence": {"sequence": "megatron"},
    "context": {"context": {"degree": 2, "kind": "ulysses"}},
    "tensor": {"tensor": {"kind": "2d"}, "tp": 4},
    "expert": {"expert": {"degree": 2}},
}
"""Field → a strategy in which it is not at its default, with what it needs."""
OTHERS_OF_JOB: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.1},
    "attention_dropout": {"attention_dropout": 0.1},
    "label_smoothing": {"label_smoothing": 0.1},
    "label_smoothing_rule": {"label_smoothing_rule": "megatron"},
    "z_loss": {"z_loss": 1e-4},
    "imbalance": {"imbalance": 1.3},
}
"""Likewise of a job, those that do not follow from the strategy."""


def unchecked(of_job: dict[str, Any] | None = None, **strategy: Any) -> Plan:
    """A plan of these choices, also of those that no rank can run yet: what is emitted is text."""
    split = Strategy(**{"dp": 2, "tp": 2, "pp": 2, "num_micro_batches": 4, "precision": "bf16", **strategy})
    batch = split.dp * split.num_micro_batches * split.micro_batch_size
    job = Job(seq_length=4096, global_batch_size=batch, **(of_job or {}))
    cluster = load_cluster(f"{split.world_size // 4}x4xh100")
    parts = {"model": load_model("llama-3-8b"), "cluster": cluster, "job": job, "strategy": split}
    return Plan.model_construct(**parts, why="")


def emitted(target: str, plan: Plan) -> Emitted:
    found: Emitted = importlib.import_module(f"meshwright.planner.emit.{target}").emit(plan)
    return found


def silent(emit: Callable[[Plan], Emitted], field: str) -> bool:
    """Whether another value of a field changes nothing that is emitted, and nothing that is noted."""
    if field in OTHERS_OF_JOB:
        return emit(unchecked(OTHERS_OF_JOB[field])) == emit(unchecked())
    choices = OTHERS[field]
    base = {name: value for name, value in choices.items() if name != field}
    return emit(unchecked(**choices)) == emit(unchecked(**base))


def test_every_target_is_found() -> None:
    assert targets() == TARGETS


def test_every_field_of_strategy_and_job_is_tried() -> None:
    missing = Strategy.model_fields.keys() - OTHERS.keys() - set(FOLLOWS_FROM_CLUSTER)
    missing |= Job.model_fields.keys() - OTHERS_OF_JOB.keys() - set(SAID_OF_JOB)
    assert not missing, "give another value of it in OTHERS, and say it, or not, in planner/emit"


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_left_out_in_silence(target: str) -> None:
    assert not [field for field in (*OTHERS, *OTHERS_OF_JOB) if silent(lambda plan: emitted(target, plan), field)]


@pytest.mark.parametrize("target", ["accelerate", "deepspeed", "nemo", "torchtitan"])
def test_an_expert_s_width_is_not_left_out_in_silence(target: str) -> None:
    """Nor is a degree of 1 advised to be set."""
    degree, width, both, same = (
        next(note for note in emitted(target, unchecked(expert=Expert(**parts))).notes if note.startswith("expert="))
        for parts in ({"degree": 2}, {"tensor": 1}, {"degree": 2, "tensor": 1}, {"tensor": 2})
    )
    advice = degree.removeprefix("expert=degree:2: ")
    said = "not expressed: the width of an expert over 1 rank, where tp=2"
    assert "not expressed" not in degree
    assert width == f"expert=tensor:1: {said}"
    assert both == f"expert=degree:2,tensor:1: {advice}; {said}"
    assert same == "expert=tensor:2: as tp=2 says already"


def test_silence_would_be_seen() -> None:
    def forgets(plan: Plan) -> Emitted:
        fields = set(Strategy.model_fields) - {"zero"}
        return Emitted({"x": str(plan.strategy.tp)}, tuple(left_out(plan, "X", fields)))

    assert silent(forgets, "recompute")
    assert not silent(forgets, "tp")
    assert not silent(forgets, "zero")


def test_megatron_reads_its_flags() -> None:
    plan = unchecked(zero=1, sequence="megatron", layers_per_stage=(17, 15), recompute="full")
    words = words_of(emitted("megatron", plan).files["megatron.sh"])
    read = parse(MEGATRON, words[words.index("pretrain_gpt.py") + 1 :])
    assert (read.tensor_model_parallel_size, read.pipeline_model_parallel_size) == (2, 2)
    assert (read.micro_batch_size, read.global_batch_size, read.seq_length) == (1, 8, 4096)
    assert read.pipeline_model_parallel_layout.count("t") == read.num_layers == 32
    assert [part.count("t") for part in read.pipeline_model_parallel_layout.split("|")] == [17, 15]
    assert all((read.use_distributed_optimizer, read.sequence_parallel, read.bf16, read.swiglu))
    assert (read.recompute_granularity, read.recompute_method, read.recompute_num_layers) == ("full", "uniform", 1)


def test_megatron_reads_latent_attention() -> None:
    plan = unchecked().model_copy(update={"model": load_model("deepseek-v3")})
    found = emitted("megatron", plan)
    words = words_of(found.files["megatron.sh"])
    read = parse(MEGATRON, words[words.index("pretrain_gpt.py") + 1 :])
    assert read.multi_latent_attention
    assert (read.q_lora_rank, read.kv_lora_rank, read.qk_head_dim) == (1536, 512, 128)
    assert (read.qk_pos_emb_head_dim, read.v_head_dim, read.rotary_scaling_factor, read.mscale) == (64, 128, 40, 1)
    assert not any("rotary" in note for note in found.notes)


@pytest.mark.parametrize(("zero", "sharding"), [(2, "optim_grads"), (3, "optim_grads_params")])
def test_megatron_shards_by_its_own_fsdp(zero: int, sharding: str) -> None:
    plan = unchecked(zero=zero, pp=1, dp=4, shard_over="node")
    words = words_of(emitted("megatron", plan).files["megatron.sh"])
    read = parse(MEGATRON, words[words.index("pretrain_gpt.py") + 1 :])
    assert read.use_megatron_fsdp
    assert read.data_parallel_sharding_strategy == sharding


def test_torchtitan_reads_its_flags() -> None:
    for strategy, degrees, reshard in (
        ({"zero": 3, "pp": 1}, (1, 2), "always"),
        ({"zero": 3, "pp": 1, "keep_gathered": True}, (1, 2), "never"),
        ({"zero": 0}, (2, 1), None),
    ):
        words = words_of(emitted("torchtitan", unchecked(**strategy)).files["torchtitan.sh"])
        read = parse(TORCHTITAN, words[words.index("torchtitan.train") + 1 :])
        assert (read.data_parallel_replicate_degree, read.data_parallel_shard_degree) == degrees
        assert read.fsdp_reshard_after_forward == reshard
        assert read.tensor_parallel_degree == 2
        split = unchecked(**strategy).strategy
        assert read.local_batch_size == (4 if split.pp > 1 else 1)
        assert read.pipeline_parallel_schedule == ("1F1B" if split.pp > 1 else None)


def test_vllm_reads_its_flags() -> None:
    words = words_of(emitted("vllm", unchecked(layers_per_stage=(17, 15))).files["vllm.sh"])
    assert words[:4] == ["VLLM_PP_LAYER_PARTITION=17,15", "vllm", "serve", "$MODEL"]
    read = parse(VLLM, words[4:])
    assert (read.tensor_parallel_size, read.pipeline_parallel_size, read.data_parallel_size) == (2, 2, 2)
    assert (read.dtype, read.max_model_len) == ("bfloat16", 4096)


def test_an_unknown_flag_would_be_seen() -> None:
    with pytest.raises(SystemExit):
        parse(VLLM, ["--tensor-parallel", "2"])
    with pytest.raises(SystemExit):
        parse(VLLM, ["--tensor-parallel-size", "two"])


def test_deepspeed_takes_the_batch_apart_as_the_plan_does() -> None:
    config = json.loads(emitted("deepspeed", unchecked(zero=3, pp=1, precision="fp16")).files["ds_config.json"])
    per_rank = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    assert config["train_batch_size"] == per_rank * 2
    assert config["fp16"] == {"enabled": True}
    assert config["tensor_parallel"] == {"autotp_size": 2}
    assert config["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_deepspeed_reads_its_zero_section(zero: int) -> None:
    config = pytest.importorskip("deepspeed.runtime.zero.config", reason="DeepSpeed is not installed")
    offload = {"optimizer": "disk", "parameters": "cpu", "path": "/scratch"} if zero == 3 else {}
    plan = unchecked(zero=zero, pp=1, offload=offload)
    section = json.loads(emitted("deepspeed", plan).files["ds_config.json"])["zero_optimization"]
    read = config.DeepSpeedZeroConfig(**section)
    assert int(read.stage) == zero
    assert read.model_extra in (None, {})
    if zero == 3:
        assert (read.offload_optimizer.device, str(read.offload_optimizer.nvme_path)) == ("nvme", "/scratch")
        assert read.offload_param.device == "cpu"


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ({"tp": 1, "pp": 1, "dp": 8}, "MULTI_GPU"),
        ({"pp": 1, "dp": 4, "zero": 3}, "FSDP"),
        ({"pp": 1, "dp": 4, "zero": 3, "shard_over": "node", "ranks_per_node": 4}, "FSDP"),
        ({"zero": 1}, "MEGATRON_LM"),
    ],
)
def test_accelerate_reads_its_file(strategy: dict[str, Any], kind: str, tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args", reason="Accelerate is not installed")
    launch = pytest.importorskip("accelerate.commands.launch")
    path = tmp_path / "accelerate.yaml"
    plan = unchecked(**strategy)
    path.write_text(emitted("accelerate", plan).files["accelerate.yaml"])
    read = config_args.load_config_from_file(str(path))
    assert (read.distributed_type.value, read.num_machines, read.num_processes) == (kind, 2, 8)
    assert read.mixed_precision == "bf16"
    words = ["--config_file", str(path), "--machine_rank", "0", "train.py"]
    known = {action.dest for action in launch.launch_command_parser()._actions}
    for section in (read.fsdp_config, read.parallelism_config, read.megatron_lm_config):
        assert set(section) <= known
    assert launch.launch_command_parser().parse_args(words).config_file == str(path)
    if kind == "FSDP":
        degrees = [value for name, value in read.parallelism_config.items() if name.endswith("_size")]
        product = 1
        for degree in degrees:
            product *= degree
        assert product == plan.strategy.world_size


def test_torchrun_reads_its_words() -> None:
    run = pytest.importorskip("torch.distributed.run")
    for target, cluster in (("megatron", "2x4xh100"), ("torchrun", "8xh100")):
        plan = unchecked().model_copy(update={"cluster": load_cluster(cluster)})
        script = next(text for name, text in emitted(target, plan).files.items() if name.endswith(".sh"))
        words = words_of(script)
        read = run.get_args_parser().parse_args(words[1:])
        assert int(read.nnodes) * int(read.nproc_per_node) == 8
        assert read.standalone == (cluster == "8xh100")
        assert read.training_script in ("pretrain_gpt.py", "meshwright")


def test_slurm_starts_a_task_per_device() -> None:
    files = emitted("slurm", unchecked()).files
    options = [line.split("--", 1)[1] for line in files["job.sbatch"].splitlines() if line.startswith("#SBATCH")]
    values = dict(option.partition("=")[::2] for option in options)
    assert values.keys() <= SBATCH
    assert int(values["nodes"]) * int(values["ntasks-per-node"]) == 8
    plan = unchecked()
    assert Plan.from_toml(files["plan.toml"]) == Plan(**dict(plan))


def test_nemo_is_python_with_known_arguments() -> None:
    tree = ast.parse(emitted("nemo", unchecked(zero=1)).files["nemo_plan.py"])
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    seen = {ast.unparse(call.func): {keyword.arg for keyword in call.keywords} for call in calls}
    assert seen.keys() == NEMO.keys()
    assert all(names <= NEMO[function] for function, names in seen.items())


def test_command_writes_files_and_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "plan.toml", tmp_path / "out"
    plan = Plan(**dict(unchecked(schedule="gpipe")))
    plan.save(path)
    assert main(["emit", str(path), "--to", "megatron", "-o", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "note: schedule=gpipe: Megatron-LM has no such choice" in shown
    assert (out / "megatron.sh").read_text() == emitted("megatron", plan).files["megatron.sh"]
    assert main(["emit", str(path), "--to", "megatron"]) == 0
    captured = capsys.readouterr()
    assert captured.out == (out / "megatron.sh").read_text()
    assert "note: schedule=gpipe" in captured.err
    with pytest.raises(InputError, match="--to megatrn: no such tool; take one of accelerate, deepspeed"):
        main(["emit", str(path), "--to", "megatrn"])
