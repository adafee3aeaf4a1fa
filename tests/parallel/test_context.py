"""Context parallelism: whole training steps beside one process, and its attention beside a dense one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.core.batch import IGNORE, PackedBatch, Places, document_ends
from meshwright.core.layouts import Context
from meshwright.core.plan import Plan
from meshwright.core.tokens import pairs_by_step, positions
from meshwright.models.documents import document_mask
from meshwright.parallel.context import block, local, ring_self_attention
from meshwright.parallel.context import ulysses as ulysses_file
from meshwright.parallel.context.apply import RINGS, WholeCore
from meshwright.parallel.context.local import Table
from meshwright.parallel.context.ring import GRADIENTS, Belt
from meshwright.parallel.context.ulysses import attention as ulysses
from meshwright.run.engine import make_mesh
from meshwright.run.parity import find_mismatch
from tests.parallel.layouts import gpt2, llama, make_plan, qwen3
from tests.parallel.runs import SGD, SHORT_PARITY, make_engine, plain_model

KINDS, BALANCES = ("ring", "ring-self-attention", "ulysses"), ("contiguous", "zigzag", "striped")
MODELS = {"llama": llama(num_layers=2), "qwen3": qwen3(num_layers=2), "gpt2": gpt2(num_layers=2)}


def plan_of(model: str, kind: str, degree: int, balance: str, **strategy: Any) -> Plan:
    context = {"kind": kind, "degree": degree, "balance": balance}
    return make_plan(MODELS[model], context=context, **strategy)


TOGETHER = [
    ("llama", "ring", 2, "zigzag", {"dp": 2, "zero": 1}),
    ("qwen3", "ring", 2, "striped", {"tp": 2, "zero": 2}),
    ("gpt2", "ring", 2, "zigzag", {"dp": 2, "zero": 3, "recompute": "full"}),
    ("llama", "ring", 2, "contiguous", {"pp": 2, "num_micro_batches": 3, "tp": 2}),
    ("llama", "ring", 2, "zigzag", {"pp": 2, "num_micro_batches": 4, "schedule": "zb-h1"}),
    ("gpt2", "ring-self-attention", 2, "zigzag", {"tp": 2, "dp": 2, "zero": 3}),
    ("qwen3", "ring-self-attention", 2, "contiguous", {"pp": 2, "num_micro_batches": 2, "recompute": "full"}),
    ("gpt2", "ring", 2, "zigzag", {"tp": 2, "sequence": "megatron", "dp": 2, "zero": 2}),
    ("qwen3", "ulysses", 2, "striped", {"tp": 2, "sequence": "megatron", "recompute": "full"}),
    ("llama", "ring", 2, "zigzag", {"dp": 2, "recompute": "selective"}),
    ("gpt2", "ring-self-attention", 2, "zigzag", {"recompute": "selective"}),
    ("llama", "ulysses", 2, "striped", {"dp": 2, "zero": 3, "micro_batch_size": 2}),
    ("llama", "ulysses", 2, "zigzag", {"tp": 2, "pp": 2, "num_micro_batches": 2, "zero": 1}),
    ("gpt2", "ulysses", 2, "contiguous", {"dp": 2, "zero": 2, "recompute": "full"}),
    ("llama", "ring", 4, "zigzag", {"micro_batch_size": 2, "precision": "fp32"}),
]


def plans(world: int) -> Iterator[Plan]:
    """Every kind, on 4 ranks with every balance, and some beside other techniques, on so many ranks."""
    models = list(MODELS)
    for number, (kind, balance) in enumerate(product(KINDS, BALANCES)):
        if world == 4 or (world == 2 and number % 4 == 0):
            yield plan_of(models[(number + world) % 3], kind, world, balance)
    for model, kind, degree, balance, further in TOGETHER:
        plan = plan_of(model, kind, degree, balance, **further)
        if plan.strategy.world_size == world:
            yield plan


def mismatches(rank: int, world: int, texts: list[str]) -> list[str]:
    found = []
    for text in texts:
        plan = Plan.from_toml(text)
        mesh = make_mesh(plan)
        if (mismatch := find_mismatch(plan, mesh, num_steps=SHORT_PARITY)) is not None:
            found.append(f"{plan.strategy.describe()} of {plan.model.name}: {mismatch}")
        mesh.close()
    return found


@pytest.mark.parametrize("world", [2, 4, 8])
def test_steps_are_those_of_one_process(ranks: Callable[..., list[list[str]]], world: int) -> None:
    """Loss, gradients, norm, weights to 1e-10 in fp64; traffic to the byte; memory as forecast."""
    texts = [plan.to_toml() for plan in plans(world)]
    assert len(texts) > 1
    assert ranks(mismatches, world, texts, timeout_s=120) == [[]] * world


# --- documents that share a sequence, and labels that don't count -------------------------------------------

PACKED = [
    ("llama", "ring", 1, "contiguous", {"dp": 2, "zero": 3, "recompute": "full"}),
    ("gpt2", "ring", 1, "contiguous", {"pp": 2, "num_micro_batches": 2}),
    ("gpt2", "ring", 2, "zigzag", {"num_micro_batches": 2}),
    ("llama", "ulysses", 2, "striped", {"num_micro_batches": 2}),
    ("gpt2", "ring", 1, "contiguous", {"tp": 2, "sequence": "megatron", "num_micro_batches": 2}),
    ("qwen3", "ring-self-attention", 2, "striped", {"tp": 2, "num_micro_batches": 2}),
    ("gpt2", "ring", 2, "striped", {"pp": 2, "num_micro_batches": 2, "recompute": "full"}),
    ("llama", "ring", 4, "contiguous", {"num_micro_batches": 2}),
    ("gpt2", "ulysses", 2, "zigzag", {"dp": 2, "zero": 2}),
    ("gpt2", "ring", 1, "contiguous", {"tp": 4, "tensor": {"kind": "2d"}, "micro_batch_size": 2}),
    ("gpt2", "ring", 1, "contiguous", {"tp": 8, "tensor": {"kind": "3d"}, "micro_batch_size": 4}),
    ("llama", "ring", 1, "contiguous", {"tp": 8, "tensor": {"kind": "2.5d", "depth": 2}, "micro_batch_size": 4}),
    ("llama", "ring", 1, "contiguous", {"tp": 8, "tensor": {"kind": "3d"}, "micro_batch_size": 4,
                                        "recompute": "selective"}),
]  # fmt: skip


def packed_batches() -> list[PackedBatch]:
    """Two micro-batches of two sequences of 16 tokens. Few labels count; in the second batch of cp ranks' shares some
    have none at all."""
    generator = torch.Generator().manual_seed(11)
    batches = []
    for number in range(2):
        tokens = torch.randint(29, (2, 16), generator=generator)
        labels = tokens.roll(-1, 1).masked_fill(torch.rand(2, 16, generator=generator) < 0.5, IGNORE)
        if number:
            labels[:, 1:] = IGNORE
        documents = (torch.rand(2, 16, generator=generator) < 0.25).long().cumsum(1)
        batches.append(PackedBatch(tokens, labels, documents))
    return batches


def joined(batches: list[PackedBatch]) -> PackedBatch:
    """All of them as one."""
    tokens, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return PackedBatch(tokens, labels, torch.cat([batch.documents for batch in batches]))


def packed_differences(rank: int, world: int, texts: list[str]) -> list[str]:
    """Layouts whose gradients are not those of one process that is given whole masks."""
    found = []
    for text in texts:
        plan = Plan.from_toml(text)
        engine = make_engine(plan, SGD)
        split = plan.strategy
        batches = packed_batches() if split.micro_batch_size < 4 else [joined(packed_batches())]
        loss = engine.forward_backward(batches[engine.mesh["dp"].index :: split.dp])
        stats = engine.update(loss, 1.0)
        evaluated = engine.evaluate([batches[engine.mesh["dp"].index :: split.dp]])
        plain = plain_model(plan.model)
        counted = sum(int((labels != IGNORE).sum()) for _, labels in batches)
        expected = sum(_packed_loss(plain, batch) for batch in batches) / counted
        expected.backward()
        norm = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm()
        with torch.no_grad():
            for p in plain.parameters():
                p -= p.grad
            after = sum(_packed_loss(plain, batch) for batch in batches) / counted
        pairs = (stats.loss, expected.detach()), (stats.grad_norm, norm), (evaluated, after)
        errors = [abs(float(ours) / float(theirs) - 1) for ours, theirs in pairs]
        if not max(errors) <= 1e-10:
            found.append(f"{split.describe()} of {plan.model.name}: loss, norm, loss after it: {errors}")
        engine.mesh.close()
    return found


def _packed_loss(plain: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
    logits = plain(batch[0], Places(16, None, batch.documents)).flatten(0, -2)
    return torch.nn.functional.cross_entropy(logits, batch[1].flatten(), ignore_index=IGNORE, reduction="sum")


@pytest.mark.parametrize("world", [2, 4, 8])
def test_documents_are_apart_in_every_layout(ranks: Callable[..., list[list[str]]], world: int) -> None:
    """Loss, gradient norm, and the loss after a large step of plain descent, which shows every gradient."""
    plans = [plan_of(*case[:4], **case[4]) for case in PACKED]
    texts = [plan.to_toml() for plan in plans if plan.strategy.world_size == world]
    assert len(texts) > 2
    assert ranks(packed_differences, world, texts, timeout_s=120) == [[]] * world


# --- attention by itself -----------------------------------------------------------------------------------

B, S, D = 2, 24, 4
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 2 + [2] * 9 + [3] * 8, [0] * 12 + [1] * 12])


@dataclass(frozen=True)
class Case:
    kind: str
    balance: str
    heads: tuple[int, int]
    """Of queries, of keys and values."""
    has_documents: bool

    def __str__(self) -> str:
        return f"{self.kind} {self.balance} {self.heads} {'documents' if self.has_documents else ''}"


HEADS = {"ring": ((4, 2), (3, 1)), "ring-self-attention": ((4, 4), (6, 2)), "ulysses": ((4, 2), (4, 4), (8, 1))}
CASES = [
    Case(kind, balance, heads, has_documents)
    for kind, balance, has_documents in product(KINDS, BALANCES, (False, True))
    for heads in HEADS[kind]
]


def inputs(heads: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """q, k, v and the gradient of the output, of whole sequences. One row of queries is large: a sharp softmax."""
    generator = torch.Generator().manual_seed(3)
    q, grad = (torch.randn(B, heads[0], S, D, dtype=torch.float64, generator=generator) for _ in range(2))
    k, v = (torch.randn(B, heads[1], S, D, dtype=torch.float64, generator=generator) for _ in range(2))
    q[:, :, S // 2] *= 30
    return q, k, v, grad


def dense(case: Case) -> list[torch.Tensor]:
    """Output, dq, dk, dv in plain products with whole masks."""
    q, k, v, grad = inputs(case.heads)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    repeated = [x.repeat_interleave(case.heads[0] // case.heads[1], dim=1) for x in (k, v)]
    documents = DOCUMENTS if case.has_documents else torch.zeros_like(DOCUMENTS)
    scores = (q @ repeated[0].transpose(-1, -2) / D**0.5).masked_fill(
        ~document_mask(documents).unsqueeze(1), -torch.inf
    )
    out = scores.softmax(-1) @ repeated[1]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


class _Plain(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def attend(mesh: Mesh, case: Case) -> list[torch.Tensor]:
    """This rank's output, dq, dk, dv."""
    axis = mesh["cp"]
    table = torch.tensor(positions(case.balance, S, axis.size, axis.index))
    q, k, v, grad = (x[:, :, table] for x in inputs(case.heads))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    who = Table(case.balance, axis.size, Places(S, table, DOCUMENTS if case.has_documents else None))
    if case.kind == "ulysses":
        out = ulysses(*leaves, axis, who, WholeCore(_Plain()))
    else:
        out = RINGS[case.kind](*leaves, axis, who)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def attention_errors(rank: int, world: int) -> list[str]:
    mesh = Mesh.create({"cp": world})
    wrong = []
    for case in CASES:
        if case.kind == "ulysses" and (case.heads[0] % world or (case.heads[1] % world and world % case.heads[1])):
            continue
        table = positions(case.balance, S, world, rank)
        for name, ours, whole in zip(("out", "dq", "dk", "dv"), attend(mesh, case), dense(case), strict=True):
            error = float((ours - whole[:, :, table]).abs().max() / whole.abs().max())
            if not error <= 1e-12:
                wrong.append(f"{case}, {name}: {error:.3g}")
    mesh.close()
    return wrong


@pytest.mark.parametrize("world", [1, 2, 4])
def test_attention_is_the_dense_one(ranks: Callable[..., list[list[str]]], world: int) -> None:
    assert ranks(attention_errors, world) == [[]] * world


def counted_pairs(rank: int, world: int, balance: str) -> tuple[list[int], list[int]]:
    """Scores of each block that the kernel was asked for, forward and backward."""
    mesh, found = Mesh.create({"cp": world}), ([], [])
    with pytest.MonkeyPatch.context() as patch:
        for number, name in enumerate(("forward", "backward")):
            right = getattr(block, name)

            def count(*args: Any, right: Any = right, number: int = number) -> Any:
                q, k = args[number : number + 2]
                n, m = q.shape[2], k.shape[2]
                found[number].append(m * (m + 1) // 2 + (n - m) * m if args[-2] else n * m)
                return right(*args)

            patch.setattr(block, name, count)
        attend(mesh, Case("ring", balance, (4, 2), has_documents=False))
    mesh.close()
    return found


@pytest.mark.parametrize("balance", ["contiguous", "zigzag"])
def test_work_is_counted_and_zigzag_is_even(ranks: Callable[..., Any], balance: Any) -> None:
    found = ranks(counted_pairs, 4, balance)
    for rank, (forward, backward) in enumerate(found):
        expected = [pairs for pairs in pairs_by_step(balance, S, 4, rank) if pairs]
        assert forward == backward == expected
    if balance == "zigzag":
        assert len({sum(forward) for forward, _ in found}) == 1


# --- what must be noticed ----------------------------------------------------------------------------------


def _keeps_its_own(belt: Belt, x: torch.Tensor) -> Any:
    """A hop that brings back what was sent."""
    return x.clone(), belt._sends.append(_Ended()) or _Ended()


class _Ended:
    def wait(self) -> None:
        return


def _first_keys_in_backward(right: Callable[..., Any]) -> Callable[..., Any]:
    """Each step of backward takes the rank's own keys and values, not those that came."""
    own: list[torch.Tensor] = []

    def add(into: Any, grad: Any, q: torch.Tensor, kv: torch.Tensor, *rest: Any) -> None:
        own[:] = [*own, kv][:1]
        right(into, grad, q, own[0], *rest)

    return add


def _no_home(right: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients of keys stay where they are instead of going round."""

    def start(self: Belt, x: torch.Tensor) -> Any:
        return _keeps_its_own(self, x) if self._tag == GRADIENTS else right(self, x)

    return start


def _a_share_of(right: Callable[..., Any]) -> Callable[..., Any]:
    """The reference's gradients, divided by the ranks."""

    def add(into: Any, *args: Any) -> None:
        right(into, *args)
        into[0].div_(2)

    return add


def _unsummed(right: Callable[..., Any]) -> Callable[..., Any]:
    def summed(weights: Any, rows: Any, axis: Any) -> Any:
        right(weights, rows, axis)[1].wait()
        by_rank = torch.einsum("bghipj,bghid->pbgjd", weights, rows)
        return by_rank[axis.index], _Ended()

    return summed


def _forgets_the_rest(right: Callable[..., Any]) -> Callable[..., Any]:
    """Each part replaces those before it."""

    def merge(into: Any, part: Any) -> None:
        into[0].copy_(part[0])
        into[1].copy_(part[1])

    return merge


def _out_of_order(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda axis, table, device: None


RING = Case("ring", "zigzag", (4, 2), has_documents=True)
ROWS = Case("ring-self-attention", "zigzag", (4, 4), has_documents=False)
HEADS_FOR_TOKENS = Case("ulysses", "zigzag", (4, 2), has_documents=False)
FAULTS: dict[str, tuple[Any, str, Callable[..., Any], Case, set[str]]] = {
    "keys do not go round": (Belt, "start", lambda right: _keeps_its_own, RING, {"out", "dq", "dk", "dv"}),
    "keys of the first step in backward": (local, "add_gradients", _first_keys_in_backward, RING, {"dq", "dk", "dv"}),
    "gradients of keys do not come home": (Belt, "start", _no_home, RING, {"dk", "dv"}),
    "gradients are divided by the ranks": (local, "add_gradients", _a_share_of, RING, {"dq"}),
    "parts are not merged": (block, "merge_", _forgets_the_rest, RING, {"out", "dq", "dk", "dv"}),
    "gradients of keys are not summed": (ring_self_attention, "_summed", _unsummed, ROWS, {"dk", "dv"}),
    "values do not go round": (Belt, "start", lambda right: _keeps_its_own, ROWS, {"out", "dq", "dk", "dv"}),
    "tokens are not put in order": (ulysses_file, "_order", _out_of_order, HEADS_FOR_TOKENS, {"out", "dq", "dk", "dv"}),
}


def wrong_parts(rank: int, world: int, names: list[str]) -> list[set[str]]:
    """What differs from the dense attention under each fault."""
    mesh, found = Mesh.create({"cp": world}), []
    for name in names:
        owner, attribute, fault, case, _ = FAULTS[name]
        table = positions(case.balance, S, world, rank)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, attribute, fault(getattr(owner, attribute)))
            pairs = zip(("out", "dq", "dk", "dv"), attend(mesh, case), dense(case), strict=True)
            found.append({part for part, ours, whole in pairs if not torch.allclose(ours, whole[:, :, table])})
    mesh.close()
    return found


def test_faults_are_noticed(ranks: Callable[..., list[list[set[str]]]]) -> None:
    """Each on some rank, in the parts that depend on it."""
    by_rank = ranks(wrong_parts, 2, list(FAULTS))
    for name, *found in zip(FAULTS, *by_rank, strict=True):
        assert set().union(*found) == FAULTS[name][-1], name


def shifted_here(rank: int, world: int) -> list[float]:
    """Loss of arange tokens with labels shifted globally, and shifted in each share."""
    engine = make_engine(plan_of("llama", "ring", world, "contiguous"), SGD)
    tokens = torch.arange(16).unsqueeze(0)
    labels = tokens.roll(-1, 1)
    own = positions("contiguous", 16, world, rank)
    right = engine.forward_backward([(tokens, labels)], reduce=False)
    wrong_labels = labels.clone()
    wrong_labels[:, own] = tokens[:, own].roll(-1, 1)
    wrong = engine.forward_backward([(tokens, wrong_labels)])
    return [float(right), float(wrong)]


def test_labels_are_those_of_the_whole_sequence(ranks: Callable[..., list[list[float]]]) -> None:
    """At the edge of a share the label is a token that another rank has; a shift in each share is another loss."""
    found = torch.tensor(ranks(shifted_here, 2)).sum(0)
    plain, tokens = plain_model(MODELS["llama"]), torch.arange(16).unsqueeze(0)
    expected = torch.nn.functional.cross_entropy(plain(tokens)[0], tokens.roll(-1, 1)[0])
    assert abs(float(found[0] - expected.detach())) < 1e-6
    assert abs(float(found[1] - expected.detach())) > 1e-3


# --- its parts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_plain_products_are_the_kernel(causal: bool) -> None:
    """What runs where there is no such kernel, a few rows at a time."""
    generator = torch.Generator().manual_seed(1)
    q, grad = (torch.randn(2, 6, 7, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    k, v = (torch.randn(2, 2, 5, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block, "MAX_SCORES", {"cpu": 2 * 6 * 5 * 3})
        ours = block._plain_forward(q, k, v, causal, None)
        gradients = block._plain_backward(grad, q, k, v, ours, causal, None)
    kernel = block.forward(q, k, v, causal)
    for mine, theirs in zip(
        (*ours, *gradients), (*kernel, *block.backward(grad, q, k, v, kernel, causal)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


def test_merged_parts_are_the_whole() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 2, 8, 4, dtype=torch.float64, generator=generator) for _ in range(3))
    out, lse = block.forward(q, k, v, causal=False)
    first, second = (block.forward(q, k[:, :, part], v[:, :, part], False) for part in (slice(0, 3), slice(3, 8)))
    block.merge_(first, second)
    torch.testing.assert_close(first, (out, lse), rtol=1e-13, atol=1e-13)


def test_rows_without_a_key_stay_empty() -> None:
    """−∞ on one side takes the other's; on both sides it stays −∞ with output 0, and nothing is nan."""
    empty = torch.zeros(1, 1, 3, 2), torch.full((1, 1, 3), -torch.inf)
    part = torch.ones(1, 1, 3, 2), torch.tensor([[[0.5, -torch.inf, 700.0]]])
    part[0][0, 0, 1] = 0
    block.merge_(empty, part)
    assert torch.equal(empty[1], part[1])
    assert torch.equal(empty[0], part[0])
    again = torch.zeros(1, 1, 3, 2), torch.full((1, 1, 3), -torch.inf)
    block.merge_(part, again)
    assert torch.equal(part[0][..., 0], torch.tensor([[[1.0, 0.0, 1.0]]]))


def test_parts_in_bf16_are_merged_in_fp32() -> None:
    """Of 64 parts; merged in bf16 the error is many times larger."""
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, 1, n, 16, generator=generator) for n in (32, 1024, 1024))
    exact = block.forward(*(x.double() for x in (q, k, v)), False)[0]
    errors = []
    for dtype in (torch.float32, torch.bfloat16):
        low = [x.bfloat16() for x in (q, k, v)]
        summed = torch.zeros(q.shape, dtype=dtype), torch.full(q.shape[:3], -torch.inf, dtype=dtype)
        for at in range(0, 1024, 16):
            out, lse = block.forward(low[0], low[1][:, :, at : at + 16], low[2][:, :, at : at + 16], False)
            block.merge_(summed, (out, lse.to(dtype)))
        errors.append(float((summed[0].double() - exact).abs().max()))
    assert errors[0] < errors[1] / 3


def test_documents_end_where_numbers_change() -> None:
    assert document_ends([0, 0, 3, 3, 4]) == (2, 4, 5)
    assert Places(5).ends is None
    assert Context().degree == 1
