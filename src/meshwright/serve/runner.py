"""One rank's part of a served model: cut and divided by the modules that training uses, and run without gradients.

plain model ─▶ pipeline.cut ─▶ tensor.apply ─▶ experts.share ─▶ weights ─▶ paged attention ─▶ kernels ─▶ packed

A step passes the stages one after the other: hidden states [1, T, h] go from rank to rank along `pp`, the logits of
the wanted rows from the last stage to the first, where the parts of the vocabulary are joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from meshwright.comm.collectives import all_gather
from meshwright.comm.mesh import Mesh
from meshwright.comm.p2p import recv_start, send_start
from meshwright.core.axes import EP, PP, TP
from meshwright.core.model import ModelSpec
from meshwright.core.placement import Box, Placement, dim_range, largest_part, placements
from meshwright.core.strategy import Strategy
from meshwright.models.gates import Choice
from meshwright.models.latent import LatentAttention
from meshwright.parallel import experts, pipeline, tensor
from meshwright.parallel.layers import layers_of, part_of
from meshwright.parallel.states import DTYPES
from meshwright.serve import layers, linear, native
from meshwright.serve.attention import PagedCore, Step, StepRope
from meshwright.serve.batch import Batch
from meshwright.serve.latent import PagedLatentAttention
from meshwright.serve.servable import check_servable
from meshwright.serve.stack import stack_of
from meshwright.serve.swap import HostTier

Weights = Callable[[tuple[Placement, ...]], Iterable[torch.Tensor]]
"""What a rank holds → the values of each box, in the same order. All ranks call it together."""

HIDDEN_TAG, LOGITS_TAG = 0, 1


class Runner:
    """Runs steps on one rank.

    Args:
        model: a plain model, on the meta device or with storage; taken over.
        spec: its shape.
        strategy: how it is divided; its tp, pp, ep, stages and the dtype of its parameters count.
        mesh: this rank's mesh, with the strategy's sizes.
        weights: where the rank reads its boxes.
        num_blocks: blocks of the cache.
        block_size: tokens of one.
        num_host_blocks: blocks of the host's memory, for what is swapped.

    Raises:
        UnsupportedError: what :func:`~meshwright.serve.servable.check_servable` refuses.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: ModelSpec,
        strategy: Strategy,
        mesh: Mesh,
        weights: Weights,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
    ) -> None:
        check_servable(spec, strategy)
        self.spec = spec
        self.mesh = mesh
        self.dtype = DTYPES[strategy.recipe.parameter]
        self._num_blocks, self.num_host_blocks = num_blocks, num_host_blocks
        self._step = Step()
        self._ropes: list[StepRope] = []
        pipeline.cut(model, spec, strategy, mesh[PP].index)
        tensor.apply(model, spec, mesh[TP])
        self._shared = experts.share(layers_of(model), spec, mesh[EP]) if strategy.ep > 1 else None
        held = (*placements(spec, strategy, mesh.coordinates), *_bias_placements(model, spec))
        _fill(model, held, weights, self.dtype, mesh.device)
        _leave_files(model)
        self.cache = self._page(model, num_blocks * block_size)
        self.host = HostTier(self.cache, num_host_blocks, block_size) if num_host_blocks else None
        self._install_kernels(model, block_size)
        linear.pack(model)
        self._model: Any = model.eval()
        """Its parts are used by name; None where they are other stages'."""
        self._stack = stack_of(model, self.cache) if mesh[PP].size == 1 else None
        self._vocab_part = largest_part(spec, "vocab", spec.vocab_size, mesh[TP].size)
        parts = (dim_range(spec, "vocab", spec.vocab_size, mesh[TP].size, at) for at in range(mesh[TP].size))
        self._vocab_sizes = [size for _, size in parts]

    @property
    def cache_bytes(self) -> int:
        """Of the keys and values on this rank."""
        return sum(layer.nbytes for layer in self.cache)

    @property
    def logits_shape(self) -> tuple[int, torch.dtype]:
        """Columns and dtype of what :meth:`run` gives."""
        return self.spec.vocab_size, torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def block_bytes(self) -> int:
        """Of one block of the cache, on this rank."""
        return self.cache_bytes // self._num_blocks

    def _page(self, model: nn.Module, num_slots: int) -> list[torch.Tensor]:
        """Put paged attention into every layer; the cache of each."""
        caches: list[torch.Tensor] = []
        ropes: dict[int, StepRope] = {}
        for layer in layers_of(model).values():
            attention = part_of(layer, "attention")
            if attention.rope is not None:
                key = id(attention.rope)
                ropes[key] = attention.rope = ropes.get(key) or StepRope(attention.rope, self._step)
            if isinstance(attention, LatentAttention):
                cache = torch.zeros(num_slots, sum(attention.latents.widths), dtype=self.dtype, device=self.mesh.device)
                layer.attention = PagedLatentAttention(attention, cache, self._step)
            else:
                heads = attention.k.weight.shape[0] // self.spec.head_dim
                shape = (2, num_slots, heads, self.spec.head_dim)
                cache = torch.zeros(shape, dtype=self.dtype, device=self.mesh.device)
                attention.core = PagedCore(cache, self._step)
            caches.append(cache)
        self._ropes = list(ropes.values())
        return caches

    def _install_kernels(self, model: nn.Module, block_size: int) -> None:
        """Where this machine has compiled kernels, and they know the model."""
        kernels = native.kernels()
        if kernels is None or not layers.can_run(model, self.dtype, self.mesh.device):
            return
        size = self.spec.head_dim
        first = part_of(next(iter(layers_of(model).values())), "attention")
        self._step.native = len(first.q.weight) // size, len(first.k.weight) // size, size, block_size
        layers.install(model, self.cache, self._step, kernels)

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor | None:
        """Compute one step. All ranks call it with the same batch.

        Returns:
            on the ranks of the first stage the logits [W, V] of the wanted rows, fp32 or wider, where there are any;
            elsewhere None.

        Raises:
            RankError: another rank is lost.
        """
        if self.host is not None:
            self.host.move(batch)
        if self._shared is not None:
            self._shared.counts = batch.shared.tolist()
        if not batch.num_tokens:
            self._run_nothing()
            return None
        pp, device = self.mesh[PP], self.mesh.device
        positions = torch.from_numpy(batch.positions).to(device)
        longest = int(batch.contexts.max())
        for rope in self._ropes:
            dtype = torch.float32 if self._step.native else self.dtype
            rope.begin(positions, _round_up(longest, self.spec.max_positions), dtype)
        self._step.begin(batch, device)
        if self._stack is not None:
            assert self._step.arrays is not None
            logits = self._stack(torch.from_numpy(batch.tokens), self._step.arrays)
            return logits if len(logits) else None
        x = self._enter(batch, positions)
        for layer in layers_of(self._model).values():
            x = layer(x)
        if self._model.head is None:
            send_start(x.contiguous(), pp, pp.index + 1, HIDDEN_TAG).wait()
        return self._logits(batch, x)

    def _run_nothing(self) -> None:
        """The rank's part of the experts that it shares, where other replicas have tokens and this one has none."""
        if self._shared is None or not any(self._shared.counts):
            return
        spec, device = self.spec, self.mesh.device
        x = torch.empty(0, spec.hidden_size, dtype=self.dtype, device=device)
        weights = torch.empty(0, spec.experts_per_token, dtype=self.logits_shape[1], device=device)
        for name, layer in layers_of(self._model).items():
            if spec.is_sparse(int(name)):
                part_of(layer, "mlp.experts")(x, weights, Choice(weights.to(torch.int64), None))

    def _enter(self, batch: Batch, positions: torch.Tensor) -> torch.Tensor:
        """[1, T, h], embedded or from the stage before."""
        pp, model = self.mesh[PP], self._model
        if pp.index:
            x = torch.empty(1, batch.num_tokens, self.spec.hidden_size, dtype=self.dtype, device=self.mesh.device)
            recv_start(x, pp, pp.index - 1, HIDDEN_TAG).wait()
            return x
        x = model.embedding(torch.from_numpy(batch.tokens).to(self.mesh.device)[None])
        return x if model.positions is None else x + model.positions(positions)

    def _logits(self, batch: Batch, x: torch.Tensor) -> torch.Tensor | None:
        pp, num_rows = self.mesh[PP], len(batch.wanted)
        if not num_rows:
            return None
        part = None
        if self._model.head is not None:
            rows = torch.from_numpy(batch.wanted).to(x.device)
            part = self._model.head(self._model.final_norm(x[:, rows]))[0]
        if pp.size > 1:
            part = self._to_first(part, num_rows)
        return None if part is None else self._join(part)

    def _to_first(self, part: torch.Tensor | None, num_rows: int) -> torch.Tensor | None:
        """Logits of the last stage, on the first."""
        pp = self.mesh[PP]
        if part is not None:
            send_start(part.contiguous(), pp, 0, LOGITS_TAG).wait()
            return None
        if pp.index:
            return None
        size = self._vocab_sizes[self.mesh[TP].index]
        part = torch.empty(num_rows, size, dtype=self.dtype, device=self.mesh.device)
        recv_start(part, pp, pp.size - 1, LOGITS_TAG).wait()
        return part

    def _join(self, part: torch.Tensor) -> torch.Tensor:
        """[W, V] from the parts [W, V/t] of a tp group; parts differ by one column at most."""
        tp = self.mesh[TP]
        part = part if part.dtype == torch.float64 else part.float()
        if tp.size == 1:
            return part
        mine = part.new_zeros(self._vocab_part, len(part))
        mine[: part.shape[1]] = part.t()
        together = all_gather(mine.new_empty(tp.size, *mine.shape), mine, tp)
        return torch.cat([together[at, :size] for at, size in enumerate(self._vocab_sizes)]).t()


def _bias_placements(model: nn.Module, spec: ModelSpec) -> tuple[Placement, ...]:
    """Of the routers' biases that this rank has: buffers, whole on every rank."""
    own = {name for name, _ in model.named_buffers()}
    return tuple(
        Placement(bias.name, bias.shape, Box.whole(bias.shape), bias.part, bias.layer, sum_over=(), owned=True)
        for bias in spec.router_biases()
        if bias.name in own
    )


def _round_up(length: int, most: int) -> int:
    """The next power of two, so that tables are made a few times only."""
    return max(length, min(1 << (length - 1).bit_length(), most))


@torch.no_grad()
def _leave_files(model: nn.Module) -> None:
    """Copy what will not be laid out anew: while one parameter lies in a file, all that was read of it stays."""
    for module in model.modules():
        for parameter in () if linear.is_packable(module) else module.parameters(recurse=False):
            if parameter.is_cpu:
                parameter.data = parameter.data.clone()


def _fill(
    model: nn.Module, held: tuple[Placement, ...], weights: Weights, dtype: torch.dtype, device: torch.device
) -> None:
    """Give every parameter its box. Tied weights stay one Parameter."""
    owners, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())
    for placement, read in zip(held, weights(held), strict=True):
        if placement.name in buffers:
            path, _, leaf = placement.name.rpartition(".")
            setattr(model.get_submodule(path), leaf, read.to(device, buffers[placement.name].dtype, copy=True))
            continue
        values = nn.Parameter(read.to(device, dtype).contiguous(), requires_grad=False)
        names = [placement.name]
        if placement.name == "embedding.weight" and model.head is not None and "head.weight" in owners:
            is_tied = not any(other.name == "head.weight" for other in held)
            names += ["head.weight"] * is_tied
        for name in names:
            path, _, leaf = name.rpartition(".")
            if name in owners:
                setattr(model.get_submodule(path), leaf, values)
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not missing, f"no values for {missing}"
