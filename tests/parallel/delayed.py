"""PipeDream's delayed updates on one process, in plain PyTorch: one micro-batch after the other, versions in a list.

Products and the loss are written so that they round as the engine's do: weight gradients of further micro-batches are
added by the product itself, so is what further projections give their common input, and probabilities are exponentials
over their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.core.batch import IGNORE, MicroBatch
from meshwright.core.plan import Plan
from meshwright.models.attention import Projections
from meshwright.train.optimizer import OptimizerOptions
from tests.parallel.runs import plain_model

DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


def version(schedule: str, k: int, stage: int, num_stages: int, m: int) -> int:
    """Updates that the weights of a stage have seen which micro-batch k uses (techniques of the two papers, by hand).

    pipedream: those of all micro-batches but the last p−1−stage; with vertical sync as on the first stage; 2bw: those
    of all steps but the last.
    """
    delays = {"pipedream": k - (num_stages - 1 - stage), "pipedream-vertical-sync": k - (num_stages - 1)}
    return max(0, delays.get(schedule, k // m - 1))


@dataclass
class DelayedUpdates:
    """One process that holds every version of every stage's weights.

    Attributes:
        version: (schedule, micro-batch, stage, stages, micro-batches per step) → version; another one for a negative
            control.
        leaves_out: number of an update that is not made, for another one.
    """

    plan: Plan
    options: OptimizerOptions
    version: Callable[[str, int, int, int, int], int] = version
    leaves_out: int | None = None
    history: list[dict[str, torch.Tensor]] = field(init=False)
    """Version → name → weight; of a stage that has seen fewer updates, the last it has."""

    def __post_init__(self) -> None:
        self.model = plain_model(self.plan.model, DTYPES[self.plan.strategy.precision])
        for module in self.model.modules():
            if isinstance(module, Projections):
                module.forward = lambda x, *layers: _Projections.apply(x, *(layer.weight for layer in layers))
            elif isinstance(module, nn.Linear):
                module.forward = lambda x, of=module: _Linear.apply(x, of.weight)
            elif isinstance(module, nn.Embedding):
                module.forward = lambda ids, of=module: _Embedding.apply(ids, of.weight)
        self.latest = {name: nn.Parameter(p.detach().clone()) for name, p in self.model.named_parameters()}
        self.stage_of = {name: self._stage(name) for name in self.latest}
        self.num_updates = 0
        self.optimizer = self._optimizer()
        self.history = [self._copy()]

    def _stage(self, name: str) -> int:
        layers = self.plan.strategy.stage_layers(self.plan.model.num_layers)
        if name.startswith("layers."):
            return next(stage for stage, held in enumerate(layers) if int(name.split(".")[1]) in held)
        return 0 if name.startswith(("embedding", "positions")) else len(layers) - 1

    def _optimizer(self) -> torch.optim.Optimizer:
        matrices = [p for p in self.latest.values() if p.ndim > 1]
        vectors = [p for p in self.latest.values() if p.ndim == 1]
        if self.options.kind == "sgd":
            return torch.optim.SGD(self.latest.values(), lr=1.0)
        groups = [{"params": matrices, "weight_decay": self.options.weight_decay}]
        groups += [{"params": vectors, "weight_decay": 0.0}] if vectors else []
        return torch.optim.AdamW(groups, lr=1.0, betas=self.options.betas, eps=self.options.eps, fused=True)

    def _copy(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.latest.items()}

    def run(self, steps: Sequence[Sequence[Sequence[MicroBatch]]], rates: Sequence[float]) -> list[float]:
        """Losses of steps between two drains.

        Args:
            steps: [step][micro-batch][dp rank].
        """
        self.history, losses = [self._copy()], []
        per_update = len(steps[0]) if self.plan.strategy.schedule == "pipedream-2bw" else 1
        for step, (micro_batches, rate) in enumerate(zip(steps, rates, strict=True)):
            total, counted = 0.0, 0
            for at in range(0, len(micro_batches), per_update):
                together = micro_batches[at : at + per_update]
                numbers = range(step * len(micro_batches) + at, step * len(micro_batches) + at + per_update)
                total += self._update(together, numbers, len(micro_batches), rate)
                counted += _num_tokens(together)
            losses.append(total / max(counted, 1))
        return losses

    def _update(self, together: Sequence[Sequence[MicroBatch]], numbers: range, m: int, rate: float) -> float:
        """Gradients of the micro-batches that are updated with together, at their versions; then the update."""
        scale, total = 1.0 / max(_num_tokens(together), 1), 0.0
        self.model.zero_grad(set_to_none=True)
        for k, replicas in zip(numbers, together, strict=True):
            self._place(k, m)
            for tokens, labels in replicas:
                loss = _LossSum.apply(self.model(tokens).flatten(0, -2), labels.flatten())
                loss.backward(torch.tensor(scale, dtype=loss.dtype))
                total += float(loss.detach())
        self.num_updates += 1
        if self.num_updates - 1 != self.leaves_out:
            for name, p in self.model.named_parameters():
                self.latest[name].grad = p.grad
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        self.history.append(self._copy())
        return total

    def _place(self, k: int, m: int) -> None:
        split = self.plan.strategy
        for name, p in self.model.named_parameters():
            used = self.version(split.schedule, k, self.stage_of[name], split.pp, m)
            p.data = self.history[used][name]


class _Linear(torch.autograd.Function):
    """F.linear without bias."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        grads = grad.flatten(0, -2)
        _add_product(weight, grads, x.flatten(0, -2))
        return (grads @ weight).view_as(x), None


class _Projections(torch.autograd.Function):
    """Linear layers without bias, of one input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        rows, total = [grad.flatten(0, -2) for grad in grads], torch.zeros_like(x).flatten(0, -2)
        for weight, grad in zip(weights, rows, strict=True):
            total.addmm_(grad, weight)
            _add_product(weight, grad, x.flatten(0, -2))
        return total.view_as(x), *(None for _ in weights)


def _add_product(weight: torch.Tensor, grads: torch.Tensor, inputs: torch.Tensor) -> None:
    if weight.grad is None:
        weight.grad = torch.empty_like(weight).addmm_(grads.t(), inputs, beta=0)
    else:
        weight.grad.addmm_(grads.t(), inputs)


class _Embedding(torch.autograd.Function):
    """F.embedding."""

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids, weight)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        ids, weight = ctx.saved_tensors
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        weight.grad.index_add_(0, ids.flatten(), grad.flatten(0, -2))
        return None, None


class _LossSum(torch.autograd.Function):
    """Cross entropy, summed over the labels that count."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        shifted = logits - logits.amax(-1, keepdim=True)
        counts, target = labels != IGNORE, labels.clamp(min=0).unsqueeze(-1)
        total = shifted.exp().sum(-1)
        ctx.save_for_backward(shifted.exp(), total, target, counts)
        return (total.log() - shifted.gather(-1, target).squeeze(-1)).masked_fill(~counts, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        exponentials, total, target, counts = ctx.saved_tensors
        scale = grad * counts
        gradient = exponentials * (scale / total).unsqueeze(-1)
        return gradient.scatter_add(-1, target, -scale.unsqueeze(-1)), None


def _num_tokens(together: Sequence[Sequence[MicroBatch]]) -> int:
    return sum(int((labels != IGNORE).sum()) for replicas in together for _, labels in replicas)
