"""Layers on square and cubic grids beside dense PyTorch: outputs and every gradient, bytes, and what is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.comm.ledger import Ledger
from meshwright.comm.mesh import Mesh
from meshwright.core.axes import TP_COL, TP_INPUT, TP_OUTPUT, TP_ROW, TP_WEIGHT
from meshwright.core.layouts import Grid, grid
from meshwright.core.layouts import Tensor as Layout
from meshwright.core.measures import Traffic
from meshwright.core.model import ModelSpec, ParamSpec
from meshwright.core.placement import param_box
from meshwright.parallel.grids import apply as grids
from meshwright.parallel.grids.apply import own_sequences
from meshwright.parallel.grids.norm import GridNorm
from meshwright.parallel.grids.summa import Panels
from meshwright.parallel.loss import Slice, cross_entropy_sum
from tests.parallel.layouts import llama

GRIDS = {
    "2d": (4, Layout(kind="2d")),
    "2.5d": (8, Layout(kind="2.5d", depth=2)),
    "3d": (8, Layout(kind="3d")),
}
KINDS = pytest.mark.parametrize("kind", GRIDS)
B, S = 8, 3
SPEC = llama(num_layers=1, gated_mlp=False, activation="gelu", mlp_bias=True)


def mesh_of(kind: str) -> tuple[Grid, Mesh]:
    tp, layout = GRIDS[kind]
    lies = grid(layout, tp)
    return lies, Mesh.create({"tp": tp}, tensor=lies.axes, ledger=Ledger())


def whole(seed: int, *shape: int) -> Tensor:
    """The same numbers on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def hidden_part(x: Tensor, lies: Grid, mesh: Mesh, sequences: tuple[str, ...], columns: tuple[str, ...]) -> Tensor:
    """This rank's part of x [b, s, h]."""
    own = own_sequences(x, mesh, sequences)
    return own_sequences(own.movedim(-1, 0), mesh, columns).movedim(0, -1).contiguous()


def summed_over(grad: Tensor, param: ParamSpec, lies: Grid, mesh: Mesh) -> Tensor:
    """A parameter's gradient as a step leaves it: summed over the ranks that hold the same box."""
    from meshwright.comm.collectives import all_reduce

    for axis in lies.replicas(param):
        grad = all_reduce(grad.clone(), mesh[axis])
    return grad


class Tiny(nn.Module):
    """The parts of a decoder that stand alone, by the names that they have there."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embedding = nn.Embedding(spec.vocab_size, spec.hidden_size, dtype=torch.float64)
        self.layers = nn.ModuleDict({"0": nn.Module()})
        layer = self.layers["0"]
        layer.mlp_norm = _Norm(spec)
        layer.mlp = nn.Module()
        layer.mlp.up = nn.Linear(spec.hidden_size, spec.ffn_size, dtype=torch.float64)
        layer.mlp.down = nn.Linear(spec.ffn_size, spec.hidden_size, dtype=torch.float64)
        self.head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False, dtype=torch.float64)


class _Norm(nn.Module):
    """Either norm, plain."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.eps = spec.norm_eps
        self.weight = nn.Parameter(torch.ones(spec.hidden_size, dtype=torch.float64))
        if spec.norm == "layernorm":
            self.bias = nn.Parameter(torch.zeros(spec.hidden_size, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if "bias" in self._parameters:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def tiny(spec: ModelSpec) -> Tiny:
    model = Tiny(spec)
    with torch.no_grad():
        for at, parameter in enumerate(model.parameters()):
            parameter.copy_(whole(at, *parameter.shape))
    return model


def split(spec: ModelSpec, lies: Grid, mesh: Mesh, keeps_operands: bool = True) -> Tiny:
    """The same model with its modules replaced, and its weights cut."""
    model, params = tiny(spec), {p.name: p for p in spec.parameters()}
    grids.apply(model, spec, lies, mesh, Panels(), keeps_operands)
    for name, parameter in model.named_parameters():
        box = param_box(spec, params[name], lies, mesh["tp"].index)
        parameter.data = parameter.data[box.slices].clone()
    return model


def check_part(
    spec: ModelSpec,
    kind: str,
    run: Callable[[Tiny, Tensor], Tensor],
    x: Tensor,
    into: tuple[tuple[str, ...], tuple[str, ...]] | None,
    out: tuple[tuple[str, ...], tuple[str, ...]],
) -> None:
    """A part of the model, whole and on the grid: outputs, the input's gradient, and the parameters'.

    `into` and `out` are the sub-axes that cut sequences and columns; `into` is None where the input is whole.
    """
    lies, mesh = mesh_of(kind)
    model, parts = tiny(spec), split(spec, lies, mesh)
    is_whole = into is None
    x_whole = x.clone().requires_grad_(x.is_floating_point())
    x_part = (x if is_whole else hidden_part(x, lies, mesh, *into)).clone().requires_grad_(x.is_floating_point())
    y = run(model, x_whole)
    cotangent = whole(99, *y.shape)
    (y * cotangent).sum().backward()
    y_part = run(parts, x_part)
    torch.testing.assert_close(y_part, hidden_part(y.detach(), lies, mesh, *out), rtol=1e-11, atol=1e-11)
    (y_part * hidden_part(cotangent, lies, mesh, *out)).sum().backward()
    if not is_whole:
        expected = hidden_part(x_whole.grad, lies, mesh, *into)
        torch.testing.assert_close(x_part.grad, expected, rtol=1e-11, atol=1e-11)
    params, own = {p.name: p for p in spec.parameters()}, dict(parts.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        found = summed_over(own[name].grad, params[name], lies, mesh)
        box = param_box(spec, params[name], lies, mesh["tp"].index)
        torch.testing.assert_close(found, parameter.grad[box.slices], rtol=1e-11, atol=1e-11)


def check_layers(rank: int, world: int, kind: str) -> None:
    """A first and a second linear layer, the head over an uneven vocabulary, both norms, the embedding."""
    lies, _ = mesh_of(kind)
    between = (lies.batch_axes, lies.hidden_axes)
    inside = (lies.logit_axes, (lies.vocab_axis,))
    hidden, inner = whole(1, B, S, SPEC.hidden_size), whole(2, B, S, SPEC.ffn_size)
    check_part(SPEC, kind, lambda m, x: m.layers["0"].mlp.up(x), hidden, between, inside)
    check_part(SPEC, kind, lambda m, x: m.layers["0"].mlp.down(x), inner, inside, between)
    even = SPEC.model_copy(update={"vocab_size": 30})
    check_part(even, kind, lambda m, x: m.head(x), hidden, between, inside)
    for norm in ("rmsnorm", "layernorm"):
        spec = SPEC.model_copy(update={"norm": norm})
        check_part(spec, kind, lambda m, x: m.layers["0"].mlp_norm(x), hidden, between, between)
    ids = torch.randint(SPEC.vocab_size, (B, S), generator=torch.Generator().manual_seed(3))
    check_part(SPEC, kind, lambda m, x: m.embedding(x), ids, None, between)


@KINDS
def test_layers_equal_dense_ones(ranks: Any, kind: str) -> None:
    ranks(check_layers, GRIDS[kind][0], kind)


def check_loss(rank: int, world: int, kind: str) -> None:
    """Head and loss over 29 rows of vocabulary, also with logits so large that their exponentials are not finite."""
    lies, mesh = mesh_of(kind)
    axis = mesh[lies.vocab_axis]
    labels = torch.randint(SPEC.vocab_size, (B, S), generator=torch.Generator().manual_seed(4))
    labels[:, 0] = -100
    for scale in (1.0, 1e3):
        model, parts = tiny(SPEC), split(SPEC, lies, mesh)
        x = whole(5, B, S, SPEC.hidden_size) * scale
        x_whole = x.clone().requires_grad_()
        x_part = hidden_part(x, lies, mesh, lies.batch_axes, lies.hidden_axes).requires_grad_()
        loss = F.cross_entropy(model.head(x_whole).flatten(0, 1), labels.flatten(), reduction="sum")
        loss.backward()
        first = 0 if axis.index == 0 else SPEC.vocab_size - SPEC.vocab_size // 2
        own_labels = own_sequences(labels, mesh, lies.logit_axes)
        own = cross_entropy_sum(parts.head(x_part), own_labels, Slice(axis, first, SPEC.vocab_size))
        own.backward()
        from meshwright.comm.collectives import all_reduce

        total = own.detach() if axis.index == 0 else torch.zeros_like(own)
        torch.testing.assert_close(all_reduce(total.clone(), mesh["tp"]), loss.detach(), rtol=1e-12, atol=1e-12)
        expected = hidden_part(x_whole.grad, lies, mesh, lies.batch_axes, lies.hidden_axes)
        torch.testing.assert_close(x_part.grad, expected, rtol=1e-10, atol=1e-10)
        assert torch.isfinite(x_part.grad).all()


@KINDS
def test_the_loss_over_an_uneven_vocabulary(ranks: Any, kind: str) -> None:
    ranks(check_loss, GRIDS[kind][0], kind)


def norm_error(rank: int, world: int, cancels: bool) -> float:
    """Largest error of a LayerNorm in fp32 of hidden states whose mean is far above their spread."""
    lies, mesh = mesh_of("2d")
    spec = SPEC.model_copy(update={"norm": "layernorm"})
    plain = _Norm(spec).float()
    x = (whole(6, B, S, spec.hidden_size) + 1e4).float()
    expected = _Norm(spec)(x.double()).float()
    part = hidden_part(x, lies, mesh, lies.batch_axes, lies.hidden_axes)
    norm = GridNorm(plain, spec.norm_eps, mesh[TP_ROW])
    for parameter in norm.parameters():
        parameter.data = parameter.data[: spec.hidden_size // 2]
    if cancels:
        from meshwright.comm.collectives import all_reduce

        sums = all_reduce(torch.stack((part.sum(-1), part.square().sum(-1))), mesh[TP_ROW]) / spec.hidden_size
        found = (part - sums[0, ..., None]) * (sums[1] - sums[0].square() + spec.norm_eps).rsqrt()[..., None]
    else:
        found = norm(part)
    error = (found - hidden_part(expected, lies, mesh, lies.batch_axes, lies.hidden_axes)).abs()
    return float(error.nan_to_num(torch.inf).max())


def test_a_mean_far_above_the_spread_keeps_its_digits(ranks: Any) -> None:
    assert max(ranks(norm_error, 4, False)) < 2e-3
    assert max(ranks(norm_error, 4, True)) > 0.1  # E[x²] − E[x]² loses them all


def mlp_traffic(rank: int, world: int, kind: str) -> list[Traffic]:
    """What one linear layer, one plain MLP and one that gathers again send, forward and backward."""
    lies, mesh = mesh_of(kind)
    spec, found = SPEC.model_copy(update={"ffn_size": 4 * SPEC.hidden_size}), []
    mlps = [split(spec, lies, mesh, keeps).layers["0"].mlp for keeps in (True, False)]
    x = hidden_part(whole(1, B, S, SPEC.hidden_size), lies, mesh, lies.batch_axes, lies.hidden_axes).requires_grad_()
    for run in (mlps[0].up, *(lambda x, m=mlp: m.down(m.up(x)) for mlp in mlps)):
        mesh.ledger.take()
        run(x).sum().backward()
        found.append(mesh.ledger.take())
    return found


@KINDS
def test_a_linear_layer_and_an_mlp_send_what_the_papers_say(ranks: Any, kind: str) -> None:
    """Bytes per rank, forward and backward, of h → 4h, and of h → 4h → h: weights β·4h² each (S_W), input β·T·h (S_X).

    2D, 2.5D   3·(q−1)/q²·(S_X/δ + S_W)          (q−1)/q²·(15·S_X/δ + 6·S_W)
    3D         2·(q−1)/q³·(S_X + S_W + 4·S_X)    (q−1)/q³·(20·S_X + 4·S_W), and 5·S_X + 2·S_W of the same where both
                                                 layers' inputs and weights are gathered again in backward
    """
    q, s_x, s_w = 2, 8 * B * S * SPEC.hidden_size, 8 * 4 * SPEC.hidden_size**2
    depth = GRIDS[kind][1].depth
    square = [3 * (q - 1) * (s_x // depth + s_w) // q**2, *[(q - 1) * (15 * s_x // depth + 6 * s_w) // q**2] * 2]
    cube = [2 * (s_x + s_w + 4 * s_x), 20 * s_x + 4 * s_w, 25 * s_x + 6 * s_w]
    expected = [(q - 1) * sent // q**3 for sent in cube] if kind == "3d" else square
    for sent in ranks(mlp_traffic, GRIDS[kind][0], kind):
        assert [traffic.wire_bytes for traffic in sent] == expected
        axes = {TP_ROW, TP_COL} if kind != "3d" else {TP_INPUT, TP_WEIGHT, TP_OUTPUT}
        assert set(sent[1].by_axis()) == axes
