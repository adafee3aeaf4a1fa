"""`DataParallel` in closed form: what one process with a model on every device holds and sends.

| device | parameters, gradients | optimizer | logits | sends in a step |
| --- | --- | --- | --- | --- |
| 0 | N each | 2·N moments | of the whole batch, and their gradient | N parameters to each other device |
| 1 to P − 1 | N each | nothing | of its own chunk | N gradients, and its logits |

Nothing is divided but the batch, and device 0 is the bottleneck of all of it. What runs is
:mod:`meshwright.parallel.data_parallel`, the reference that `DistributedDataParallel` and ZeRO replaced.

Sources: PyTorch, `torch.nn.DataParallel`; Li et al. 2020 §2 (why it was superseded).
"""

from __future__ import annotations

from meshwright.core.axes import DP
from meshwright.core.errors import InputError
from meshwright.core.job import Job
from meshwright.core.measures import MemoryBreakdown, Traffic
from meshwright.core.model import ModelSpec
from meshwright.core.precision import NUM_MOMENTS
from meshwright.core.strategy import Strategy
from meshwright.cost.activations import ByteTerm, embedding_terms, head_terms, layer_terms, total_bytes
from meshwright.cost.memory import tables_bytes

INDEX_BYTES = 8
"""Token ids and labels are int64."""


def chunk_sizes(batch: int, num_devices: int) -> tuple[int, ...]:
    """Sequences of each chunk, as `torch.chunk` cuts: equal but for the last, and fewer than devices where the batch
    runs out."""
    size = -(-batch // num_devices)
    return tuple(min(size, batch - start) for start in range(0, batch, size))


def data_parallel_memory(
    model: ModelSpec, job: Job, strategy: Strategy, num_devices: int, index: int
) -> MemoryBreakdown:
    """Peak of one training step on device `index`.

    Working bytes are logits: on device 0 those of the whole batch and their gradient, on the others those of one chunk.

    Args:
        model, job: what is trained.
        strategy: read for precision and `num_micro_batches`; each micro-batch is cut over all devices.
        num_devices: P.
        index: 0 to P − 1. A device that gets no chunk holds nothing.

    Raises InputError for a device that is not there.
    """
    batch, chunks = _cut(job, strategy, num_devices, index)
    if index >= len(chunks):
        return MemoryBreakdown(0, 0, 0, 0, 0)
    recipe, is_first = strategy.recipe, index == 0
    parameters_bytes = model.num_parameters * recipe.parameter_bytes
    moments_bytes = model.num_parameters * NUM_MOMENTS[job.optimizer] * recipe.moment_bytes
    terms = _replica_terms(model, job, strategy, chunks[index])
    logits = 2 * batch if is_first else chunks[index]
    return MemoryBreakdown(
        parameters_bytes=parameters_bytes,
        gradients_bytes=model.num_parameters * recipe.gradient_bytes,
        optimizer_bytes=moments_bytes if is_first else 0,
        activations_bytes=total_bytes([*terms, *(_loss_terms(model, job, strategy, batch) if is_first else ())]),
        buffers_bytes=tables_bytes(model, job, strategy),
        working_bytes=_logits_bytes(model, job, strategy, logits),
    )


def data_parallel_traffic(model: ModelSpec, job: Job, strategy: Strategy, num_devices: int, index: int) -> Traffic:
    """What device `index` sends in one training step; arguments as for :func:`data_parallel_memory`.

    Parameters and gradients go tensor by tensor.
    """
    _, chunks = _cut(job, strategy, num_devices, index)
    recipe, times, total = strategy.recipe, strategy.num_micro_batches, Traffic()
    if index >= len(chunks):
        return total

    def send(phase: str, payload_bytes: int) -> None:
        total.add("send", DP, phase, payload_bytes, num_devices, times)

    if index > 0:
        send("forward", _logits_bytes(model, job, strategy, chunks[index]))
        for parameter in model.parameters():
            send("gradients", parameter.numel * recipe.gradient_bytes)
        return total
    for chunk in chunks[1:]:
        send("forward", chunk * job.seq_length * INDEX_BYTES)
        send("backward", _logits_bytes(model, job, strategy, chunk))
        for parameter in model.parameters():
            send("parameters", parameter.numel * recipe.parameter_bytes)
    return total


def _cut(job: Job, strategy: Strategy, num_devices: int, index: int) -> tuple[int, tuple[int, ...]]:
    """Sequences of a micro-batch, and of each of its chunks."""
    if not 0 <= index < num_devices:
        raise InputError(f"device {index} of {num_devices}: devices count from 0 to {num_devices - 1}")
    batch = job.global_batch_size // strategy.num_micro_batches
    return batch, chunk_sizes(batch, num_devices)


def _logits_bytes(model: ModelSpec, job: Job, strategy: Strategy, sequences: int) -> int:
    return sequences * job.seq_length * model.vocab_size * strategy.recipe.parameter_bytes


def _replica_terms(model: ModelSpec, job: Job, strategy: Strategy, sequences: int) -> list[ByteTerm]:
    """What one replica keeps from forward to backward. A plain embedding keeps no flags of other ranks' ids."""
    alone = Strategy(precision=strategy.precision)
    b, s = sequences, job.seq_length
    ids = [term for term in embedding_terms(model, alone, b, s) if term.name != "ids of other ranks"]
    layers = [term for layer in range(model.num_layers) for term in layer_terms(model, alone, b, s, layer)]
    return [*ids, *layers, *head_terms(model, alone, b, s)]


def _loss_terms(model: ModelSpec, job: Job, strategy: Strategy, sequences: int) -> list[ByteTerm]:
    """What the plain cross entropy keeps, of the whole batch: log-probabilities, labels, and their total weight."""
    tokens = sequences * job.seq_length
    return [
        ByteTerm("log-probabilities", tokens * model.vocab_size * strategy.recipe.statistic_bytes),
        ByteTerm("labels", tokens * INDEX_BYTES),
        ByteTerm("weight of the labels", strategy.recipe.statistic_bytes),
    ]
