"""The DataParallel reference: one process's gradients whatever the chunks, one loss for all, device 0's burden."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from meshwright.core.batch import IGNORE, MicroBatch
from meshwright.core.errors import InputError, UnsupportedError
from meshwright.core.job import Job
from meshwright.core.measures import Traffic
from meshwright.core.model import ModelSpec
from meshwright.core.strategy import Strategy
from meshwright.cost.data_parallel import chunk_sizes, data_parallel_memory, data_parallel_traffic
from meshwright.models.build import build
from meshwright.parallel.data_parallel import DataParallel
from tests.parallel.layouts import gpt2, llama, qwen3
from tests.parallel.runs import assert_close, counted_batches, plain_gradients, plain_model

COUNTS = (8, 1, 5, 0, 7, 3, 2)
"""Counted tokens of seven sequences."""
SPECS = pytest.mark.parametrize("spec", [llama(), qwen3(), gpt2()], ids=lambda spec: spec.name)


def one_batch(spec: ModelSpec, counts: Sequence[int] = COUNTS) -> MicroBatch:
    """Sequences with so many counted tokens each, as one batch."""
    tokens, labels = (torch.cat(tensors) for tensors in zip(*counted_batches(spec, counts), strict=True))
    return tokens, labels


def gradients(
    spec: ModelSpec, num_devices: int, batches: Sequence[MicroBatch]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of device 0."""
    parallel = DataParallel(plain_model(spec), num_devices)
    loss = float(parallel.forward_backward(batches))
    return loss, {name: p.grad for name, p in parallel.model.named_parameters()}


@SPECS
@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 9])
def test_equals_one_process_for_uneven_chunks(spec: ModelSpec, num_devices: int) -> None:
    batch = one_batch(spec)
    loss, ours = gradients(spec, num_devices, [batch])
    expected_loss, expected = plain_gradients(spec, [batch])
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert_close(ours, expected)


def test_several_micro_batches_are_the_mean_over_all_their_tokens() -> None:
    spec = llama()
    batches = [one_batch(spec, COUNTS[:4]), one_batch(spec, COUNTS[4:])]
    _, ours = gradients(spec, 3, batches)
    assert_close(ours, plain_gradients(spec, batches)[1])


def test_a_loss_inside_the_replicas_would_be_wrong() -> None:
    """Negative control: the mean of the chunks' means is another number, and has other gradients."""
    spec = llama()
    tokens, labels = one_batch(spec)
    plain = plain_model(spec)
    means = [
        F.cross_entropy(plain(t).flatten(0, 1), y.flatten(), ignore_index=IGNORE)
        for t, y in zip(tokens.chunk(3), labels.chunk(3), strict=True)
    ]
    mean_of_means = torch.stack(means).mean()
    mean_of_means.backward()
    loss, ours = gradients(spec, 3, [(tokens, labels)])
    assert abs(float(mean_of_means.detach()) / loss - 1) > 1e-4
    with pytest.raises(AssertionError):
        assert_close(ours, {name: p.grad for name, p in plain.named_parameters()}, tolerance=1e-2)


def test_replicas_follow_the_update_of_device_0() -> None:
    spec = llama()
    batches, steps = [one_batch(spec)], 3
    plain, parallel = plain_model(spec), DataParallel(plain_model(spec), 2)
    alone = DataParallel(plain, 1)
    for model in (alone, parallel):
        optimizer = torch.optim.AdamW(model.model.parameters(), lr=1e-2, eps=1e-4)
        for _ in range(steps):
            optimizer.zero_grad()
            model.forward_backward(batches)
            optimizer.step()
    ours, expected = ({n: p.detach() for n, p in m.named_parameters()} for m in (parallel.model, plain))
    assert_close(ours, expected)


Measured = tuple[DataParallel, torch.optim.Optimizer]


def measured(spec: ModelSpec, num_devices: int, num_micro_batches: int, dtype: torch.dtype) -> Measured:
    """After two steps of seven sequences per micro-batch, the second one measured."""
    parallel = DataParallel(plain_model(spec, dtype), num_devices)
    optimizer = torch.optim.AdamW(parallel.model.parameters())
    for step in range(2):
        parallel.take_traffic()
        parallel.forward_backward([one_batch(spec)] * num_micro_batches, measure=step == 1)
        optimizer.step()
    return parallel, optimizer


@SPECS
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize(("num_devices", "micro"), [(1, 1), (2, 1), (3, 2), (5, 1)])
def test_memory_and_traffic_are_as_forecast(spec: ModelSpec, precision: str, num_devices: int, micro: int) -> None:
    """To the byte, on every device, with fewer chunks than devices too (7 sequences on 5 devices: 2, 2, 2, 1)."""
    dtype = {"fp32": torch.float32, "fp64": torch.float64}[precision]
    parallel, optimizer = measured(spec, num_devices, micro, dtype)
    job = Job(seq_length=8, global_batch_size=len(COUNTS) * micro)
    strategy = Strategy.parse({"precision": precision, "num_micro_batches": micro}, "strategy")
    memories, traffics = parallel.memory(optimizer), parallel.take_traffic()
    for index in range(num_devices):
        assert memories[index] == data_parallel_memory(spec, job, strategy, num_devices, index), index
        assert traffics[index] == data_parallel_traffic(spec, job, strategy, num_devices, index), index


def test_device_0_holds_and_sends_most() -> None:
    parallel, optimizer = measured(llama(vocab_size=997), 3, 1, torch.float32)
    first, *others = parallel.memory(optimizer)
    assert all(first.total_bytes > 2 * other.total_bytes for other in others)
    assert all(other.optimizer_bytes == 0 for other in others)
    sent = parallel.take_traffic()
    assert sent[0].wire_bytes > sent[1].wire_bytes > 0


def test_the_forecast_of_a_sum_is_the_sum_of_its_parts() -> None:
    """Busiest link: device 0 sends N parameters to each of the others and takes N gradients from each."""
    spec, devices = llama(), 4
    job, strategy = Job(seq_length=8, global_batch_size=8), Strategy()
    traffics = [data_parallel_traffic(spec, job, strategy, devices, index) for index in range(devices)]
    whole_bytes = 4 * spec.num_parameters

    def wire(traffic: Traffic, phase: str) -> int:
        return sum(row.wire_bytes for (_, _, name), row in traffic.rows.items() if name == phase)

    assert wire(traffics[0], "parameters") == 3 * whole_bytes
    assert [wire(traffic, "gradients") for traffic in traffics] == [0, *3 * [whole_bytes]]


@pytest.mark.parametrize(
    ("batch", "devices", "sizes"), [(8, 4, (2, 2, 2, 2)), (7, 3, (3, 3, 1)), (7, 5, (2, 2, 2, 1)), (2, 4, (1, 1))]
)
def test_chunks_are_cut_as_torch_does(batch: int, devices: int, sizes: tuple[int, ...]) -> None:
    assert chunk_sizes(batch, devices) == sizes
    assert tuple(len(chunk) for chunk in torch.empty(batch).chunk(devices)) == sizes


def test_what_it_cannot_do_is_said() -> None:
    spec = llama()
    with pytest.raises(InputError, match="over 0 devices"):
        DataParallel(plain_model(spec), 0)
    with pytest.raises(InputError, match="has none"):
        DataParallel(build(spec), 2)
    with pytest.raises(UnsupportedError, match="bfloat16"):
        DataParallel(plain_model(spec, torch.bfloat16), 2)
    with pytest.raises(InputError, match="device 2 of 2"):
        data_parallel_traffic(spec, Job(seq_length=8, global_batch_size=8), Strategy(), 2, 2)
