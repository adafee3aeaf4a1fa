"""`DataParallel` of PyTorch's own history: one process, a replica on every device. A reference, superseded.

What it divides: the batch, and nothing else. Everything passes device 0:

    device 0    tokens      parameters      logits, loss      gradient of logits      gradients, update
                  │ chunks      │ copies        ▲ each chunk's     │ chunks                ▲ all of each replica's
    others        ▼             ▼ forward ──────┘                  ▼ backward ─────────────┘

What it needs: a plain model in fp32 or fp64. What it costs: `cost.data_parallel`; phases `parameters` (copies, in every
forward), `forward` (tokens and logits), `backward` (gradients of logits) and `gradients`.

Why nobody trains with it any more (Li et al. 2020 §2; PyTorch's documentation of `torch.nn.DataParallel`): all traffic
passes device 0, parameters cross in every forward, the threads that drive replicas take turns in one interpreter,
device 0 holds what the others don't, and one process is one machine. `DistributedDataParallel` and ZeRO replaced it:
:mod:`meshwright.parallel.data`.

Here devices are virtual: each has memory of its own on the CPU, its messages are counted, and all run one by one.
The loss is taken on device 0, over all counted tokens of the batch. Inside the replicas it would be a mean of means,
wrong as soon as chunks count different numbers of tokens. A buffer that a replica changes is lost, but for device 0's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.comm.ledger import Ledger
from meshwright.core.axes import DP
from meshwright.core.batch import IGNORE, MicroBatch
from meshwright.core.errors import InputError, UnsupportedError
from meshwright.core.measures import MemoryBreakdown, Traffic
from meshwright.parallel.census import ActivationCensus

DTYPES = (torch.float32, torch.float64)
"""What it was made for: a parameter is its own master copy."""


class VirtualDevice:
    """One device: its replica, what it holds besides, and the messages that it sends."""

    def __init__(self, index: int, num_devices: int, model: nn.Module) -> None:
        self.index = index
        self.model = model
        self.ledger = Ledger()
        self.census: ActivationCensus | None = None
        self.gradients_bytes = 0
        """Of whole gradients, as they were before they left."""
        self.working_bytes = 0
        """Most bytes of logits at a time."""
        self._num_devices = num_devices
        self._held: dict[str, torch.Tensor] = {}
        self._is_used = False

    def hold(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Count `x` as held here, until :meth:`drop`."""
        self._held[name] = x
        self.working_bytes = max(self.working_bytes, sum(map(_bytes, self._held.values())))
        return x

    def drop(self, name: str) -> torch.Tensor:
        """What `hold` counted; it is free once the caller is done with it."""
        return self._held.pop(name)

    def send(self, phase: str, x: torch.Tensor) -> torch.Tensor:
        """A copy of `x`, in another device's memory; counted as this device's message."""
        with self.ledger.phase(phase):
            self.ledger.record("send", DP, _bytes(x), self._num_devices)
        return x.detach().clone()

    def counting(self) -> AbstractContextManager[object]:
        """Where a census runs: what autograd keeps inside is this device's."""
        return self.census or nullcontext()

    def measure(self) -> None:
        """Begin a census of a step."""
        self.census = ActivationCensus([*self.model.parameters(), *self.model.buffers()])

    def forward(self, tokens: torch.Tensor) -> GradientEdge:
        """Run a chunk [b, s]; its logits [b, s, V] are held here. Returns where their gradient will enter."""
        self._is_used = True
        with self.counting():
            logits = self.model(tokens)
        self.hold("logits", logits.detach())
        return get_gradient_edge(logits)

    def backward(self, edge: GradientEdge) -> None:
        """From the gradient of the logits, held here, to those of this replica's parameters."""
        torch.autograd.backward(edge, self.drop("gradient"))
        self.gradients_bytes = sum(_bytes(p.grad) for p in self.model.parameters() if p.grad is not None)

    def memory(self, optimizer: torch.optim.Optimizer | None) -> MemoryBreakdown:
        """What it held at the peak of the last step. A device that had no chunk holds nothing."""
        if not self._is_used:
            return MemoryBreakdown(0, 0, 0, 0, 0)
        return MemoryBreakdown(
            parameters_bytes=sum(map(_bytes, self.model.parameters())),
            gradients_bytes=self.gradients_bytes,
            optimizer_bytes=0 if optimizer is None else _state_bytes(optimizer),
            activations_bytes=self.census.peak_bytes if self.census else 0,
            buffers_bytes=sum(map(_bytes, self.model.buffers())),
            working_bytes=self.working_bytes,
        )


class DataParallel:
    """A plain model, run on chunks of the batch by one replica per device.

    The caller's optimizer updates `model`, which is device 0's; replicas take its values over in every forward.

    Args:
        model: with weights, in fp32 or fp64; called with token ids [b, s], it returns logits [b, s, V].
        num_devices: P, device 0 included.

    Raises:
        InputError: no device, or a model without weights.
        UnsupportedError: 16-bit parameters.
    """

    def __init__(self, model: nn.Module, num_devices: int) -> None:
        _check(model, num_devices)
        self.model = model
        replicas = [model, *(copy.deepcopy(model) for _ in range(num_devices - 1))]
        self.devices = [VirtualDevice(index, num_devices, replica) for index, replica in enumerate(replicas)]

    def forward_backward(self, micro_batches: Sequence[MicroBatch], *, measure: bool = False) -> torch.Tensor:
        """Add the gradient of the mean loss over all counted tokens to `model`'s; returns that mean, a scalar.

        Args:
            micro_batches: of the whole batch. Each is cut over all devices, as evenly as `torch.chunk` does.
            measure: count activations too. Not in the first step, when constant tables are made.
        """
        counted = torch.stack([(labels != IGNORE).sum() for _, labels in micro_batches]).sum().clamp(min=1).double()
        for device in self.devices:
            device.working_bytes = 0
            if measure:
                device.measure()
        losses = [self._run(tokens, labels, counted) for tokens, labels in micro_batches]
        return torch.stack(losses).sum()

    def _run(self, tokens: torch.Tensor, labels: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """One micro-batch: scatter, copy, forward, gather, loss, scatter, backward, reduce."""
        devices, chunks = self._scatter(tokens)
        self._copy_parameters(devices)
        edges = [device.forward(chunk) for device, chunk in zip(devices, chunks, strict=True)]
        logits = self._gather(devices)
        loss = self._loss(logits, labels, counted)
        del logits
        self._scatter_gradient(devices, [len(chunk) for chunk in chunks])
        for device, edge in zip(devices, edges, strict=True):
            device.backward(edge)
        self._reduce(devices)
        return loss

    def _scatter(self, tokens: torch.Tensor) -> tuple[list[VirtualDevice], list[torch.Tensor]]:
        """The devices that get a chunk, and the chunks [b_i, s], equal but for the last."""
        first, *others = tokens.chunk(len(self.devices))
        chunks = [first.clone(), *(self.devices[0].send("forward", chunk) for chunk in others)]
        return self.devices[: len(chunks)], chunks

    @torch.no_grad()
    def _copy_parameters(self, devices: Sequence[VirtualDevice]) -> None:
        for device in devices[1:]:
            for ours, theirs in zip(self.model.parameters(), device.model.parameters(), strict=True):
                theirs.copy_(self.devices[0].send("parameters", ours))

    def _gather(self, devices: Sequence[VirtualDevice]) -> torch.Tensor:
        """All logits [B, s, V] on device 0, where backward will start; the replicas' own are freed."""
        first, *others = devices
        arrived = [device.send("forward", device.drop("logits")) for device in others]
        logits = first.hold("all logits", torch.cat([first.drop("logits"), *arrived]))
        return logits.requires_grad_()

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """On device 0: this micro-batch's sum / tokens of the step. Leaves the gradient of the logits there."""
        first = self.devices[0]
        with first.counting():
            total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="sum")
        torch.autograd.backward(total, counted.reciprocal().to(total.dtype))
        assert logits.grad is not None
        first.hold("gradient", logits.grad)
        first.drop("all logits")
        return total.detach() / counted

    def _scatter_gradient(self, devices: Sequence[VirtualDevice], sizes: list[int]) -> None:
        """Each device its part of the gradient of the logits."""
        first, *others = devices
        own, *parts = torch.split(first.drop("gradient"), sizes)
        for device, part in zip(others, parts, strict=True):
            device.hold("gradient", first.send("backward", part))
        first.hold("gradient", own)

    @torch.no_grad()
    def _reduce(self, devices: Sequence[VirtualDevice]) -> None:
        """Add the replicas' gradients to device 0's and free them."""
        for device in devices[1:]:
            for ours, theirs in zip(self.model.parameters(), device.model.parameters(), strict=True):
                if theirs.grad is not None:
                    arrived, theirs.grad = device.send("gradients", theirs.grad), None
                    ours.grad = arrived if ours.grad is None else ours.grad.add_(arrived)

    def memory(self, optimizer: torch.optim.Optimizer) -> list[MemoryBreakdown]:
        """Each device at the peak of the last step; activations of the last one that was measured."""
        return [device.memory(optimizer if device.index == 0 else None) for device in self.devices]

    def take_traffic(self) -> list[Traffic]:
        """What each device has sent since the last call."""
        return [device.ledger.take() for device in self.devices]


def _check(model: nn.Module, num_devices: int) -> None:
    if num_devices < 1:
        raise InputError(f"DataParallel over {num_devices} devices: at least one is needed")
    if any(p.is_meta for p in model.parameters()):
        raise InputError("DataParallel copies a model's weights, and this model has none: build it on a device")
    dtypes = {p.dtype for p in model.parameters()}
    if not dtypes <= set(DTYPES):
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes.difference(DTYPES)))
        raise UnsupportedError(
            f"DataParallel of {names} parameters: it keeps no master copies; use float32, or ZeRO stage 0"
        )


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Moments; step counts are not tensors of a parameter's size."""
    states = (value for state in optimizer.state.values() for value in state.values())
    return sum(_bytes(x) for x in states if isinstance(x, torch.Tensor) and x.ndim > 0)
