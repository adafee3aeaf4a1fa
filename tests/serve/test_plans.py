"""Plans for serving, carried out: what a step sends and what a rank holds are what the plan says."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from meshwright.cli.main import main
from meshwright.cli.serve import _check_room, _num_ranks_here, _plan, _refuse_unused, _sizes, serve_command
from meshwright.comm.mesh import Mesh
from meshwright.core.axes import DP, PP, TP, coordinates_of
from meshwright.core.errors import InputError, UnsupportedError
from meshwright.core.measures import Traffic
from meshwright.core.serving import Layout, Requests, ServingPlan
from meshwright.core.sources import load_cluster
from meshwright.cost.kv_cache import largest_kv_token_bytes
from meshwright.cost.serving import step_traffic
from meshwright.cost.serving_memory import weights_bytes
from meshwright.models.hf import export
from meshwright.run import launch
from meshwright.run.serving import Address
from meshwright.serve.batch import HEADER
from meshwright.serve.engine import Engine
from meshwright.serve.options import ServeOptions
from meshwright.serve.request import SamplingParams
from tests.models.tiny import SPECS, random_model

PROMPTS = (5, 3)
BLOCK_SIZE, NUM_BLOCKS = 4, 14


def one_step(rank: int, world: int, name: str, layout: Layout) -> tuple[Traffic, int, int]:
    """(what the rank sent in a step of both prompts, its parameters' bytes, its cache's)."""
    model = random_model(SPECS[name])
    options = ServeOptions(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, step_tokens=16)
    engine = Engine(model, layout.replica, options, mesh=Mesh.create(layout.replica.sizes))
    ledger = engine.mesh.ledger
    ledger.take()
    if rank == 0:
        for at, length in enumerate(PROMPTS):
            engine.submit([at] * length, SamplingParams(max_tokens=2, temperature=0))
        engine.step()
        sent = ledger.take()
        engine.stop()
    else:
        engine.follow()
        sent = ledger.take()
    return sent, engine.runner.cache_bytes, engine.scheduler.longest


@pytest.mark.parametrize(("name", "tp", "pp"), [("llama", 2, 1), ("gpt2", 2, 2), ("llama", 1, 2)])
def test_a_step_sends_what_is_forecast_to_the_byte(ranks, name: str, tp: int, pp: int):
    layout, spec = Layout(tp=tp, pp=pp, precision="fp32"), SPECS[name]
    num_tokens, num_chunks = sum(PROMPTS), len(PROMPTS)
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in PROMPTS)
    num_words = HEADER + num_tokens + 3 * num_chunks + num_blocks + num_chunks
    for rank, (sent, cache_bytes, _) in enumerate(ranks(one_step, tp * pp, name, layout)):
        expected = step_traffic(spec, layout, rank // tp, num_tokens, num_chunks, num_words, rank % tp)
        told = [traffic.rows.pop(("broadcast", "world", "other")) for traffic in (sent, expected)]
        assert sent.to_list() == expected.to_list()
        assert told[0].calls - told[1].calls == (rank > 0), "the end is told to those that follow"
        assert cache_bytes <= NUM_BLOCKS * BLOCK_SIZE * largest_kv_token_bytes(spec, layout.replica)
    wrong = step_traffic(spec, layout, 0, num_tokens + 1, num_chunks, num_words)
    assert wrong.wire_bytes != expected.wire_bytes


OF_REPLICAS = ((5, 3), (2,))
"""Prompts of each."""


def one_step_of_replicas(rank: int, world: int, name: str, layout: Layout) -> Traffic:
    """What the rank sent in a step of all replicas; if it follows, with the end that it passes on."""
    options = ServeOptions(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, step_tokens=16)
    mesh = Mesh.create(layout.strategy.sizes, ep=layout.ep)
    engine = Engine(random_model(SPECS[name]), layout.strategy, options, mesh=mesh)
    mesh.ledger.take()
    if rank:
        engine.follow()
        return mesh.ledger.take()
    for replica, lengths in zip(engine.replicas, OF_REPLICAS, strict=True):
        for length in lengths:
            replica.submit([1] * length, SamplingParams(max_tokens=2, temperature=0))
        replica.begin_step()
    for replica in engine.replicas:
        replica.end_step()
    sent = mesh.ledger.take()
    for replica in engine.replicas:
        replica.stop()
    return sent


@pytest.mark.parametrize(
    ("name", "tp", "pp", "ep"),
    [
        ("mixtral", 1, 1, 2),
        ("deepseek-v3", 1, 2, 2),
        ("mixtral", 2, 1, 2),
        ("deepseek-v3", 2, 1, 2),
        ("deepseek-v3", 2, 1, 1),
        ("llama", 1, 1, 1),
    ],
)
def test_a_step_of_replicas_sends_what_is_forecast_to_the_byte(ranks, name: str, tp: int, pp: int, ep: int):
    layout, spec = Layout(tp=tp, pp=pp, ep=ep, replicas=2, precision="fp32"), SPECS[name]
    num_tokens = [sum(lengths) for lengths in OF_REPLICAS]
    words = [
        HEADER + sum(lengths) + 4 * len(lengths) + sum(-(-n // BLOCK_SIZE) for n in lengths) + (2 if ep > 1 else 0)
        for lengths in OF_REPLICAS
    ]
    for rank, sent in enumerate(ranks(one_step_of_replicas, 2 * tp * pp, name, layout)):
        replica, stage, index = map(coordinates_of(rank, layout.strategy.sizes).get, (DP, PP, TP))
        expected = step_traffic(
            spec, layout, stage, num_tokens[replica], len(OF_REPLICAS[replica]), words[replica], index, replica,
            num_tokens if ep > 1 else (), words[1:] if not replica else (),
        )  # fmt: skip
        for axis in (*((TP,) * (stage == 0)), PP) if rank else ():
            expected.add("broadcast", axis, "other", 8, getattr(layout, axis))
        assert sent.to_list() == expected.to_list()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_weights_take_what_is_forecast(name: str):
    model = random_model(SPECS[name])
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert weights_bytes(SPECS[name], Layout(precision="fp32"), 0) == held


def context_of(*words: str) -> typer.Context:
    """As the command line gives it."""
    app = typer.Typer()
    app.command()(serve_command)
    return typer.main.get_command(app).make_context("serve", ["model", *words])


def test_the_plans_sizes_hold_but_for_those_that_are_typed():
    layout = Layout(precision="fp32", num_blocks=77, block_size=8, step_tokens=512, max_running=32)
    requests = Requests(prompt_tokens=8, output_tokens=8, rate_per_s=1)
    plan = ServingPlan(model=SPECS["llama"], cluster=load_cluster("local:1"), requests=requests, layout=layout)
    typed = ServeOptions(step_tokens=128, max_waiting=5)
    found = _sizes(plan, typed, context_of())
    assert (found.num_blocks, found.block_size, found.step_tokens, found.max_running) == (77, 8, 512, 32)
    assert found.max_waiting == 5
    assert _sizes(plan, typed, context_of("--step-tokens", "128")).step_tokens == 128
    assert _sizes(plan, typed, context_of("--cache-mib", "64")).num_blocks is None
    assert _sizes(None, typed, context_of()) is typed


def test_a_cache_for_other_devices_is_refused_here(monkeypatch: pytest.MonkeyPatch):
    layout = Layout(precision="fp32", num_blocks=2**29)
    requests = Requests(prompt_tokens=8, output_tokens=8, rate_per_s=1)
    plan = ServingPlan(model=SPECS["llama"], cluster=load_cluster("1xh100"), requests=requests, layout=layout)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match=r"the plan.s cache takes .* no GPU; give --cache-mib"):
        _check_room(plan, ServeOptions(num_blocks=2**29))
    _check_room(plan, ServeOptions())
    _check_room(plan, ServeOptions(num_blocks=16))
    with pytest.raises(InputError, match=r"--cache-mib 1073741824 takes .* on each of 1 rank, .* no GPU; give it less"):
        _check_room(None, ServeOptions(cache_bytes=2**50))
    _check_room(None, ServeOptions())
    assert _num_ranks_here(64) == 64
    for variable, value in {"RANK": "0", "WORLD_SIZE": "64", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(variable, value)
    assert _num_ranks_here(64) == 2
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    _check_room(None, ServeOptions(cache_bytes=2**50))
    _check_room(plan, ServeOptions(num_blocks=2**29))


def test_replicas_that_share_experts_are_served_and_not_those_of_a_limited_capacity(tmp_path: Path):
    requests = Requests(prompt_tokens=8, output_tokens=8, rate_per_s=1)
    layout = Layout(replicas=2, ep=2, precision="fp32")
    spec = SPECS["mixtral"]
    plan = ServingPlan(model=spec, cluster=load_cluster("local:2"), requests=requests, layout=layout)
    plan.save(tmp_path / "serve.toml")
    assert _plan(tmp_path / "serve.toml").strategy.world_size == 2
    limited = spec.model_copy(update={"router": spec.gate.model_copy(update={"capacity_factor": 1.0})})
    plan.model_copy(update={"model": limited}).save(tmp_path / "serve.toml")
    with pytest.raises(UnsupportedError, match=r"serve\.toml: .* experts of limited capacity"):
        _plan(tmp_path / "serve.toml")


def test_memory_of_the_host_is_given_to_swapping_alone_and_not_more_than_there_is():
    with pytest.raises(InputError, match=r"--swap-mib: with --preempt recompute nothing is swapped; add"):
        _refuse_unused(context_of("--swap-mib", "64"), "recompute")
    _refuse_unused(context_of("--swap-mib", "64"), "auto")
    _refuse_unused(context_of(), "recompute")
    with pytest.raises(InputError, match=r"--swap-mib 1073741824 takes .* of the host for each of 1 rank"):
        _check_room(None, ServeOptions(swap_bytes=2**50, preempt="swap"))
    _check_room(None, ServeOptions(swap_bytes=2**50))


def test_what_is_wrong_for_every_rank_is_told_before_any_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "launch", lambda *_, **__: pytest.fail("ranks were started"))
    model = random_model(SPECS["llama"])
    export(tmp_path / "model", SPECS["llama"], model.stored())
    asked = Requests(prompt_tokens=8, output_tokens=8, rate_per_s=1)
    layout = Layout(tp=2, precision="fp32", num_blocks=9, block_size=16)
    plan = ServingPlan(model=SPECS["gpt2"], cluster=load_cluster("local:2"), requests=asked, layout=layout)
    plan.save(tmp_path / "plan.toml")
    with pytest.raises(InputError, match=r"the plan is for `.*`, whose parameters are not those of"):
        main(["serve", str(tmp_path / "model"), "--plan", str(tmp_path / "plan.toml")])
    with Address("127.0.0.1", 0).bind() as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(InputError, match=f"127.0.0.1:{port}: cannot listen there"):
            main(["serve", str(tmp_path / "model"), "--replicas", "2", "--port", port])
