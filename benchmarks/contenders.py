"""What the benchmarks of a training step share: sizes, batches, the peers' steps and ours, and how they take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard  # noqa: TID251 (a peer)
from torch.nn.parallel import DistributedDataParallel

from meshwright.comm import collectives, mesh
from meshwright.core.axes import WORLD
from meshwright.core.cluster import ClusterSpec, Device, Link
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.plan import Plan
from meshwright.core.strategy import Strategy
from meshwright.models.build import build
from meshwright.run.engine import Engine, parallelize
from meshwright.train.optimizer import OptimizerOptions

LEARNING_RATE = 1e-4
OPTIONS = OptimizerOptions(weight_decay=0.1)
SEED = 0

Batch = tuple[torch.Tensor, torch.Tensor]
"""Tokens and their labels, [b, s] each."""
Step = Callable[[torch.Tensor, torch.Tensor], object]
"""One training step on (tokens, labels)."""
Times = dict[str, list[float]]
"""Contender → one value per measured step."""


@dataclass(frozen=True)
class Size:
    """A Llama-like model and what each rank trains on per step."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    seq_length: int
    batch_per_rank: int

    def spec(self) -> ModelSpec:
        heads = self.hidden_size // 64
        return ModelSpec(
            name="llama-like", family="llama", vocab_size=self.vocab_size, hidden_size=self.hidden_size,
            num_layers=self.num_layers, num_heads=heads, num_kv_heads=heads, head_dim=64,
            ffn_size=-(-self.hidden_size * 8 // 3 // 64) * 64, max_positions=self.seq_length, norm="rmsnorm",
            positions="rope", activation="silu", gated_mlp=True, tied_embeddings=False,
        )  # fmt: skip

    def batch(self, rank: int, turn: int) -> Batch:
        """Random tokens."""
        generator = torch.Generator().manual_seed(1000 * rank + turn)
        rows = torch.randint(self.vocab_size, (self.batch_per_rank, self.seq_length + 1), generator=generator)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in build(self.spec(), "meta").parameters())


SIZES = {
    "XS": Size(2, 64, 512, 64, 1),
    "S": Size(4, 256, 4096, 256, 4),
    "M": Size(8, 512, 8192, 256, 2),
    "L": Size(12, 768, 32000, 128, 1),
}


def adamw_groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, object]]:
    """Biases and norms are not decayed."""
    held = list(parameters)
    return [
        {"params": [p for p in held if p.ndim > 1], "weight_decay": OPTIONS.weight_decay},
        {"params": [p for p in held if p.ndim == 1], "weight_decay": 0.0},
    ]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """The peers' optimizer, fused."""
    return torch.optim.AdamW(
        adamw_groups(parameters), lr=LEARNING_RATE, betas=OPTIONS.betas, eps=OPTIONS.eps, fused=True
    )


def plain_step(
    forward: Callable[[torch.Tensor], torch.Tensor],
    parameters: Callable[[], Iterable[nn.Parameter]],
    optimizer: torch.optim.Optimizer,
    clip: float | None,
) -> Step:
    """A step as its peers' documentation writes it."""

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> None:
        F.cross_entropy(forward(tokens).flatten(0, 1), labels.flatten()).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters(), clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def take_weights(model: nn.Module, weights: nn.Module) -> nn.Module:
    """`model`, its parameters sharing the memory of those of `weights`."""
    for name, parameter in weights.named_parameters():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, nn.Parameter(parameter.detach()))
    return model


@dataclass
class Ddp:
    """DDP beside its floor: the same tensors without the communication."""

    model: nn.Module
    clip: float | None
    bucket_mib: float = 25
    """DDP's own default."""

    def __post_init__(self) -> None:
        self.parallel = DistributedDataParallel(self.model, gradient_as_bucket_view=True, bucket_cap_mb=self.bucket_mib)
        self.optimizer = adamw(self.model.parameters())
        self.step = plain_step(self.parallel, self.model.parameters, self.optimizer, self.clip)

    def floor(self, spec: ModelSpec) -> Step:
        """The same step on parameters and moments that share ddp's memory, without DDP's hooks and clipping. Moments
        must be there: after a step."""
        plain = take_weights(build(spec, "meta"), self.model)
        optimizer = adamw(plain.parameters())
        for ours, theirs in zip(plain.parameters(), self.model.parameters()):
            optimizer.state[ours] = self.optimizer.state[theirs]
        return plain_step(plain, plain.parameters, optimizer, None)

    @property
    def state_bytes(self) -> int:
        """Parameters, as many gradients (views of the buckets), moments."""
        parameters = 2 * sum(p.nbytes for p in self.model.parameters())
        return parameters + sum(
            t.nbytes for kept in self.optimizer.state.values() for t in kept.values() if torch.is_tensor(t)
        )


def fsdp2(model: nn.Module, clip: float | None, *, reshard: bool = True) -> Step:
    """A step of `fully_shard`, of every layer and of the model; `reshard` frees a layer's parameters after forward."""
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=None if reshard else False)
    return plain_step(model, model.parameters, adamw(model.parameters()), clip)


def make_plan(size: Size, strategy: Strategy, *, num_nodes: int = 1) -> Plan:
    """A plan over the CPU ranks of this machine; the numbers of its cluster price nothing here."""
    device = Device(name="cpu", memory_bytes=2**40, memory_bandwidth_bytes_per_s=1e10, peak_flops_per_s={"fp32": 1e11})
    memory = Link(name="memory", bandwidth_bytes_per_s=1e9, latency_s=1e-4)
    cable = Link(name="cable", bandwidth_bytes_per_s=1.25e7, latency_s=1e-3)
    cluster = ClusterSpec(
        name="here", num_nodes=num_nodes, devices_per_node=strategy.world_size // num_nodes, device=device,
        intra_link=memory, inter_link=memory if num_nodes == 1 else cable, backend="gloo",
    )  # fmt: skip
    return Plan(
        model=size.spec(),
        cluster=cluster,
        job=Job(
            seq_length=size.seq_length,
            global_batch_size=strategy.dp * strategy.num_micro_batches * size.batch_per_rank,
        ),
        strategy=strategy.model_copy(update={"micro_batch_size": size.batch_per_rank}),
    )


def our_engine(plan: Plan, world: mesh.Mesh, weights: nn.Module, clip: float | None) -> Engine:
    """The engine over a plain model that has the weights of `weights`."""
    options = OptimizerOptions(betas=OPTIONS.betas, weight_decay=OPTIONS.weight_decay, clip_norm=clip)
    return parallelize(take_weights(build(plan.model, "meta"), weights), plan, mesh=world, options=options)


def our_step(engine: Engine) -> Step:
    """A step of ours."""
    return lambda tokens, labels: engine.step([(tokens, labels)], LEARNING_RATE)


def rounds(names: Sequence[str], turns: int, *, warm_up: int = 2) -> Iterator[tuple[int, str, bool]]:
    """(turn, contender, whether it is measured): each once per turn; who is first rotates."""
    for turn in range(turns + warm_up):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            yield turn, name, turn >= warm_up


def timed(step: Step, batch: Batch, world: mesh.Mesh) -> tuple[float, float]:
    """(wall, processor) seconds of a step that all ranks start together; the processor's until all have ended."""
    collectives.barrier(world[WORLD])
    began, cpu_began = time.perf_counter(), time.process_time()
    step(*batch)
    seconds = time.perf_counter() - began
    collectives.barrier(world[WORLD])
    return seconds, time.process_time() - cpu_began


def quartiles(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Of the ratios, turn by turn: lower quartile, median, upper quartile."""
    ratios = sorted(ours / theirs for ours, theirs in zip(values, base))
    return statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3


def available_bytes() -> int:
    """Memory that new processes of this machine can have."""
    with open("/proc/meminfo") as lines:
        values = dict(line.split(":", 1) for line in lines)
    return int(values["MemAvailable"].split()[0]) * 1024
