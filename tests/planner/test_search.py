"""Best first finds what pricing everything finds; no bound is above what it bounds."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from random import Random

import pytest

from meshwright.core.job import Job
from meshwright.core.layouts import Context, Expert, Tensor
from meshwright.core.rules import violations
from meshwright.core.sources import load_cluster
from meshwright.core.strategy import Offload, Strategy
from meshwright.planner import bounds
from meshwright.planner.balance import balanced
from meshwright.planner.enumerate import Choices, strategies
from meshwright.planner.fix import parse_fix
from meshwright.planner.parts import Parts
from meshwright.planner.price import Pricer
from meshwright.planner.search import DIVIDED, ORDERED, PRICED, SIZED, WAITED, searched

MIXTURE = {"family": "mixtral", "num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 96, "num_layers": 4}
CASES = {
    "dense": ({"num_layers": 8, "vocab_size": 4096}, (2, 2), {}),
    "odd layers": ({"num_layers": 7, "tied_embeddings": True}, (1, 4), {}),
    "little memory": ({"num_layers": 8, "vocab_size": 4096}, (1, 4), {"memory_bytes": 12 * 10**6}),
    "mixture": (MIXTURE, (1, 4), {}),
    "mixture, first layer dense": ({**MIXTURE, "num_layers": 6, "dense_layers": (0,)}, (1, 4), {}),
    "mixture, costly layers dense": (
        {**MIXTURE, "num_layers": 6, "dense_layers": (0, 1, 4), "ffn_size": 4096}, "1x4xh100", {}
    ),
    "cpu": ({"num_layers": 6}, (2, 2), {"backend": "gloo"}),
    "zero bubble": ({"num_layers": 8}, (1, 4), {"fix": ["schedule=zb-h1"]}),
    "all gathered": ({"num_layers": 4}, (2, 2), {"fix": ["zero=3"]}),
    "shared cores": ({"num_layers": 6}, "local:4", {}),
    "profile": ({"num_layers": 8, "hidden_size": 512, "ffn_size": 2048}, "2x4xh100", {}),
    "offload": ({"num_layers": 4}, (1, 2), {"fix": ["offload=optimizer:cpu"]}),
    "activations offloaded": ({"num_layers": 4}, (1, 4), {"fix": ["offload=activations:cpu", "zero=1"]}),
    "shared experts": ({**MIXTURE, "num_layers": 6, "dense_layers": (0,)}, (2, 2), {"fix": ["zero=3"]}),
}  # fmt: skip
JOB = Job(seq_length=64, global_batch_size=8)


@pytest.fixture(scope="module", params=CASES)
def space(request, model, cluster):
    """(search, pricer, everything priced)."""
    shape, nodes, more = CASES[request.param]
    fix = parse_fix(more.get("fix", []))
    spec, others = model(**shape), {k: v for k, v in more.items() if k != "fix"}
    machines = load_cluster(nodes) if isinstance(nodes, str) else cluster(*nodes, **others)
    pricer = Pricer(spec, machines, JOB)
    legal = strategies(spec, machines, JOB, fix).legal
    every = [pricer.forecast(s) for s in (*legal, *balanced(legal, spec, JOB))]
    return searched(spec, machines, JOB, fix), every


def key(forecast):
    return forecast.step_time.total_s, forecast.device_bytes


def test_the_order_is_that_of_pricing_everything(space):
    search, every = space
    expected = sorted(f.step_time.total_s for f in every if f.fits)
    found = list(search.fastest())
    assert [f.step_time.total_s for f in found] == pytest.approx(expected, rel=1e-12)
    assert sorted(f.device_bytes for f in found) == sorted(f.device_bytes for f in every if f.fits)
    assert len(every) > 20


def test_the_first_of_a_kind_and_the_smallest(space):
    search, every = space
    for kind in (lambda s: s.zero == 0, lambda s: s.recompute == "full", lambda s: s.pp > 1, lambda s: s.tp == 2):
        expected = min((key(f) for f in every if f.fits and kind(f.strategy)), default=None)
        found = next(search.fastest(kind), None)
        assert (found and key(found)) == (expected and pytest.approx(expected))
    assert next(search.smallest()).device_bytes == min(f.device_bytes for f in every)


def test_no_bound_is_above_what_it_bounds(space):
    search, _ = space
    list(search.smallest())  # prices everything
    levels = {DIVIDED, SIZED, WAITED, ORDERED}
    seen = set()
    for above, priced in (pair for root in search._roots for pair in ways_down(root, ())):
        for node in above:
            assert node.bound.seconds <= priced.bound.seconds * (1 + 1e-9), priced.strategy.describe()
            assert node.bound.num_bytes <= priced.bound.num_bytes, priced.strategy.describe()
            seen.add(node.level)
    assert seen == levels


def ways_down(node, above):
    """(nodes above, priced) of all that a node became."""
    if node.level == PRICED:
        yield above, node
    for child in node.children or ():
        yield from ways_down(child, (*above, node))


def test_a_bound_that_is_too_high_is_noticed(model, cluster, monkeypatch):
    """What a wrong bound would do: the fastest does not come first."""
    spec, machines = model(num_layers=8), cluster(1, 4)
    right = [key(f) for f in searched(spec, machines, JOB, {}).fastest()]
    sized = bounds.Bounds.sized

    def too_high(self, strategy, before):
        bound = sized(self, strategy, before)
        return replace(bound, seconds=bound.seconds * (10 if strategy.zero else 1))

    monkeypatch.setattr(bounds.Bounds, "sized", too_high)
    assert [key(f) for f in searched(spec, machines, JOB, {}).fastest()] != right


def test_few_are_priced(llama_70b, cluster):
    search = searched(llama_70b, cluster(16, 8), Job(seq_length=4096, global_batch_size=256), {})
    fastest = list(islice(search.fastest(), 3))
    assert fastest == sorted(fastest, key=key)
    assert len(search.priced) < 60
    choices = Choices(llama_70b, cluster(16, 8), Job(seq_length=4096, global_batch_size=256), {})
    assert sum(1 for split in choices.splits() for _ in choices.sizes(split)) > 1000


def test_few_orders_are_looked_at(llama_70b, cluster, monkeypatch):
    """An order of a whole strategy is bounded by itself only where the best of all orders may win."""
    seen = []
    ordered = bounds.Bounds.ordered
    monkeypatch.setattr(bounds.Bounds, "ordered", lambda *args: seen.append(args) or ordered(*args))
    search = searched(llama_70b, cluster(16, 8), Job(seq_length=4096, global_batch_size=256), {})
    list(islice(search.fastest(), 3))
    assert 0 < len(seen) < 100


def test_what_bounds_rule_out_is_not_priced(llama_70b, cluster):
    job = Job(seq_length=4096, global_batch_size=256)
    search = searched(llama_70b, cluster(1, 8, memory_bytes=10**9), job, {})
    assert search.smallest_fitting() is None
    assert not search.priced
    search = searched(llama_70b, cluster(16, 8), job, {})
    assert search.smallest_fitting() == next(search.smallest())


CHOICES = {
    "dp": (2, 4), "tp": (2,), "pp": (2, 4), "zero": (1, 2, 3), "micro_batch_size": (2,), "num_micro_batches": (4, 8),
    "recompute": ("full", "selective"), "recompute_layers": (1, 2), "recompute_group": (2,), "precision": ("bf16",),
    "schedule": ("gpipe", "interleaved-1f1b", "zb-h1", "dualpipe-v"), "num_chunks": (2,), "prefetch": (0, 2),
    "sequence": ("megatron",), "layers_per_stage": ((3, 5), (1, 2, 3, 2)), "bucket_bytes": (2**12,), "tile": (2,),
    "tensor": (Tensor(kind="2d"), Tensor(kind="3d")), "context": (Context(degree=2), Context(degree=2, kind="ulysses")),
    "expert": (Expert(degree=2), Expert(degree=2, tensor=1)), "keep_gathered": (True,), "reduce_each": (True,),
    "shard_over": ("node",), "ranks_per_node": (4,), "offload": (Offload(optimizer="cpu"), Offload(activations="cpu")),
}  # fmt: skip
"""Each field of a strategy, and values of it."""


def drawn(random):
    """Three fields or so at other values."""
    names = random.sample(sorted(CHOICES), random.randint(2, 6))
    return Strategy().model_copy(update={name: random.choice(CHOICES[name]) for name in names})


def priced_after_others(spec, machines, num_draws):
    """(strategies drawn that are legal, those of them that are priced otherwise after the others than alone)."""
    pricer, random, num, wrong = Pricer(spec, machines, JOB), Random(0), 0, []
    for _ in range(num_draws):
        s = drawn(random)
        job = JOB.model_copy(update={"global_batch_size": s.dp * s.micro_batch_size * s.num_micro_batches})
        fits = machines.model_copy(update={"num_nodes": 1, "devices_per_node": s.world_size})
        if not violations(s, spec, fits, job):
            num += 1
            wrong += [s] * (pricer.forecast(s) != Pricer(spec, machines, JOB).forecast(s))
    return num, wrong


def test_no_field_is_forgotten_where_strategies_share_parts(model, cluster, monkeypatch):
    """What is priced after others, whose parts it may share, is priced as if it were alone; whatever field differs."""
    assert set(CHOICES) == set(Strategy.model_fields)
    for spec in (model(num_layers=8), model(**{**MIXTURE, "num_layers": 8, "dense_layers": (0,)})):
        num, wrong = priced_after_others(spec, cluster(2, 8), 400)
        assert num > 50
        assert not wrong
    found = Parts._find_keys
    monkeypatch.setattr(Parts, "_find_keys", lambda self, s: replace(found(self, s), moved=()))
    _, wrong = priced_after_others(model(num_layers=8), cluster(2, 8), 400)
    assert wrong
