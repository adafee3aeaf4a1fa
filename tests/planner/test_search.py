"""Best first finds what pricing everything finds; no bound is above what it bounds."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from meshwright.core.job import Job
from meshwright.core.sources import load_cluster
from meshwright.planner import bounds
from meshwright.planner.balance import balanced
from meshwright.planner.enumerate import Choices, strategies
from meshwright.planner.fix import parse_fix
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
