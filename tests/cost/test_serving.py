"""Steps of a served model, and a server in its steady state, against numbers worked out by hand and a small server that
runs step by step."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.profile import Profile, Server, Stack
from meshwright.core.serving import Layout, Requests
from meshwright.core.sources import load_cluster, load_model
from meshwright.core.strategy import Strategy
from meshwright.cost.kernels import layers_kernels, rates
from meshwright.cost.kv_cache import kv_token_bytes
from meshwright.cost.serving import (
    ATTENTION,
    CHOICE_BYTES,
    EXCHANGE,
    HOST,
    KEYS,
    LATENCY,
    PRODUCTS,
    REDUCTIONS,
    STREAMS,
    WEIGHT_BYTES,
    WEIGHTS,
    StepCosts,
    Work,
    arithmetic_balance,
    num_reductions,
)
from meshwright.cost.serving_memory import most_blocks, serving_memory, working_bytes
from meshwright.cost.steady import ALONE, CACHE, PROMPTS, TPOT, TTFT, Capacity, capacity, load, load_at
from tests.shapes import make_model

H100 = load_cluster("8xh100")
LLAMA_70B = load_model("llama-3-70b")
DEVICE = H100.device.model_copy(update={"profile": None})
PLAIN = H100.model_copy(update={"device": DEVICE, "compute_efficiency": 1.0})
"""Peaks and bandwidths as they stand, no profile: what the formulas by hand take."""
SMALL = make_model(num_layers=4, hidden_size=1024, num_heads=16, num_kv_heads=4, head_dim=64, ffn_size=4096)
REQUESTS = Requests(prompt_tokens=512, output_tokens=64, rate_per_s=1.0)


def seconds(costs: StepCosts, work: Work) -> dict[str, float]:
    return {term.name: term.seconds for term in costs.terms(work)}


# --- memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "precision", "bytes_per_token"),
    [("llama-3-70b", "bf16", 327_680), ("llama-3-8b", "bf16", 131_072), ("llama-3-405b", "bf16", 516_096),
     ("gpt-3-175b", "bf16", 4_718_592), ("llama-3-8b", "fp32", 262_144)],
)  # fmt: skip
def test_a_token_takes_what_the_formula_says(name: str, precision: str, bytes_per_token: int):
    """2 · L · g · d · β, with few key/value heads and with one for each query head."""
    assert kv_token_bytes(load_model(name), Layout(precision=precision).replica) == bytes_per_token


@pytest.mark.parametrize(("kv_heads", "shares"), [(8, (1, 2, 4, 8)), (2, (1, 2, 2, 2)), (1, (1, 1, 1, 1))])
def test_keys_and_values_are_divided_as_far_as_there_are_heads(kv_heads: int, shares: tuple[int, ...]):
    """All heads with their own, groups of them, and one for all: what more ranks than heads hold, they hold twice."""
    model = make_model(num_heads=8, num_kv_heads=kv_heads)
    whole = kv_token_bytes(model, Layout().replica)
    assert tuple(whole // kv_token_bytes(model, Layout(tp=tp).replica) for tp in (1, 2, 4, 8)) == shares


def test_weights_of_70b_over_four_ranks():
    """140 GB / 4 = 35 GB, and norms that every rank holds whole."""
    memory = serving_memory(LLAMA_70B, Layout(tp=4))
    exact = 2 * LLAMA_70B.num_parameters / 4
    norms = 2 * (2 * 80 + 1) * 8192
    assert memory.weights_bytes == exact + 0.75 * norms
    assert memory.token_bytes == 327_680 // 4


def test_what_a_rank_has_left_is_cache():
    layout = Layout(tp=4)
    memory = serving_memory(LLAMA_70B, layout)
    blocks = most_blocks(memory, layout, H100)
    assert (
        0 <= H100.usable_memory_bytes - memory.fixed_bytes - blocks * 16 * memory.token_bytes < 16 * memory.token_bytes
    )
    assert most_blocks(serving_memory(LLAMA_70B, Layout()), Layout(), H100) < 0


def test_larger_steps_and_batches_work_with_more():
    least = working_bytes(SMALL, Layout())
    assert working_bytes(SMALL, Layout(step_tokens=4096)) > least
    assert working_bytes(SMALL, Layout(step_tokens=4096, max_running=4096)) > working_bytes(
        SMALL, Layout(step_tokens=4096)
    )


def test_experts_are_shared_by_replicas():
    model = load_model("mixtral-8x7b")
    alone, shared = (serving_memory(model, Layout(replicas=8, ep=ep)).weights_bytes for ep in (1, 8))
    experts = sum(p.numel for p in model.parameters() if "experts" in p.dims)
    assert alone - shared == 2 * experts * 7 // 8


# --- a step ------------------------------------------------------------------------------------------------


def test_decoding_by_hand():
    """70B on one H100 of plain figures: all matrices and the context's keys and values once through memory."""
    found = seconds(StepCosts(LLAMA_70B, Layout(), PLAIN), Work(1, 2048, num_rows=1))
    matrices = sum(p.numel for p in LLAMA_70B.parameters() if p.part in ("attention", "mlp", "head"))
    assert found[WEIGHTS] == pytest.approx(2 * matrices / 3350e9, rel=1e-3)
    assert found[KEYS] == pytest.approx(327_680 * 2048 / 3350e9)
    assert found[PRODUCTS] == found[ATTENTION] == found[LATENCY] == 0


def test_prompts_by_hand():
    """2 FLOPs for each parameter in a product and token, and 4·L·a·d for each key that a token sees."""
    tokens = 4096
    found = seconds(StepCosts(LLAMA_70B, Layout(), PLAIN), Work(0, 0, tokens, (tokens + 1) / 2, 1))
    matrices = sum(p.numel for p in LLAMA_70B.parameters() if p.part in ("attention", "mlp"))
    assert found[WEIGHTS] + found[PRODUCTS] == pytest.approx(2 * matrices * tokens / 989e12, rel=2e-3)
    assert found[WEIGHTS] < 0.2 * found[PRODUCTS]
    assert found[ATTENTION] == pytest.approx(4 * 80 * 8192 * tokens * (tokens + 1) / 2 / 989e12)


def test_weights_are_read_once_for_the_whole_batch():
    costs = StepCosts(LLAMA_70B, Layout(tp=8), PLAIN)
    one, many = (seconds(costs, Work(n, 2048, num_rows=n)) for n in (1, 64))
    assert many[WEIGHTS] < 1.03 * one[WEIGHTS]
    assert many[KEYS] == pytest.approx(64 * one[KEYS])


def test_products_are_bound_by_compute_from_the_balance_on():
    """B* = peak · β / (2 · bandwidth): 295 on an H100. Below it all products wait for memory, far above none does."""
    assert arithmetic_balance(H100, Layout()) == pytest.approx(295.2, abs=0.1)
    costs = StepCosts(LLAMA_70B, Layout(), PLAIN)
    assert seconds(costs, Work(200, 1, num_rows=200))[PRODUCTS] == 0
    more = seconds(costs, Work(600, 1, num_rows=600))
    assert more[PRODUCTS] > 0.8 * more[WEIGHTS]


def test_reductions_by_hand():
    """Two all-reduces a layer and one of the embedding, by trees of 3 rounds each way over 8 ranks; then the logits."""
    link, found = H100.intra_link, seconds(StepCosts(LLAMA_70B, Layout(tp=8), PLAIN), Work(1, 2048, num_rows=1))
    sums = num_reductions(LLAMA_70B)
    assert sums == 161
    rounds = sums * 6 + 3 + 2 * 3
    assert found[LATENCY] == pytest.approx(rounds * link.latency_s)
    sent = sums * 2 * 7 / 8 * 2 * 8192 + 7 / 8 * 4 * LLAMA_70B.vocab_size
    assert found[REDUCTIONS] == pytest.approx(sent / link.bandwidth_bytes_per_s, rel=1e-3)


def test_there_is_a_degree_beyond_which_decoding_gets_slower():
    """Where a round of a reduction takes long; where it takes nothing, there is none."""

    def curve(latency_s: float) -> list[float]:
        link = PLAIN.intra_link.model_copy(update={"latency_s": latency_s})
        slow = PLAIN.model_copy(update={"intra_link": link})
        return [StepCosts(SMALL, Layout(tp=tp), slow).step_s(Work(1, 64, num_rows=1)) for tp in (1, 2, 4, 8)]

    assert curve(0.0) == sorted(curve(0.0), reverse=True)
    assert curve(20e-6) == sorted(curve(20e-6))


def test_stages_follow_one_another():
    """A pipeline takes what one rank takes, and the messages."""
    work = Work(4, 64, num_rows=4)
    one, two = (StepCosts(SMALL, Layout(pp=pp), PLAIN).step_s(work) for pp in (1, 2))
    link = PLAIN.intra_link
    hidden, logits = 4 * SMALL.hidden_size * 2, 4 * SMALL.vocab_size * 2
    told = 2 * 1 * link.latency_s
    assert two - one == pytest.approx(2 * link.latency_s + (hidden + logits) / link.bandwidth_bytes_per_s + told)


@pytest.mark.parametrize("name", ["llama-3-70b", "gpt-3-175b", "mixtral-8x7b", "deepseek-v3"])
def test_a_whole_prompt_takes_what_trainings_forward_takes(name: str):
    """The same kernels, priced by the same profile: products, attention and streams of each layer."""
    model, layout, tokens = load_model(name), Layout(tp=2), 2048
    speed = rates(H100.device, H100.device.profile, "bf16", 2)
    strategy, job = Strategy(tp=2, precision="bf16"), Job(seq_length=tokens, global_batch_size=1)
    each = layers_kernels(model, job, strategy, speed, Stack(), range(model.num_layers))
    found = seconds(StepCosts(model, layout, H100), Work(0, 0, tokens, tokens / 2, 0))
    assert found[PRODUCTS] + found[WEIGHTS] == pytest.approx(each.products.forward)
    as_wide_as_keys = 2 * model.heads_size / (model.heads_size + model.values_size)  # training pads narrow values
    assert as_wide_as_keys * found[ATTENTION] == pytest.approx(each.attention.forward)
    assert found[STREAMS] == pytest.approx(each.streams.forward)


def test_a_latent_is_read_once_for_all_heads():
    """DeepSeek-V3 keeps 61 · 576 numbers of a token, 70,272 bytes, on every rank of tp; with twice the bandwidth their
    products with 128 heads take longer."""
    model, work = load_model("deepseek-v3"), Work(8, 4096, num_rows=8)
    device = DEVICE.model_copy(update={"memory_bandwidth_bytes_per_s": 2 * 3350e9})
    fast = PLAIN.model_copy(update={"device": device})
    one, divided, bound = (
        seconds(StepCosts(model, Layout(tp=tp), cluster), work)[KEYS]
        for tp, cluster in ((1, PLAIN), (8, PLAIN), (1, fast))
    )
    assert one == divided == pytest.approx(70_272 * 8 * 4096 / 3350e9)
    assert bound == pytest.approx(2 * 128 * (576 + 512) * 8 * 4096 * 61 / 989e12)


def test_one_token_reads_only_its_experts():
    model = load_model("mixtral-8x7b")
    costs = StepCosts(model, Layout(), PLAIN)
    one, many = (seconds(costs, Work(n, 64, num_rows=n))[WEIGHTS] for n in (1, 64))
    assert one == pytest.approx(2 * model.num_active_parameters / 3350e9, rel=0.02)
    assert many == pytest.approx(2 * model.num_parameters / 3350e9, rel=0.02)


def test_replicas_that_share_experts_exchange_tokens():
    model = load_model("mixtral-8x7b")
    work = Work(16, 64, num_rows=16)
    alone, shared = (seconds(StepCosts(model, Layout(replicas=8, ep=ep), PLAIN), work) for ep in (1, 8))
    assert alone[EXCHANGE] == 0
    rows, numbers = 16 * 4096 * 2, 16 * 2 * (WEIGHT_BYTES + CHOICE_BYTES)
    sent = 7 * (2 * rows + numbers)  # rows there, sums back, and what each token's experts are
    link, rounds = PLAIN.intra_link, 3  # trees of eight
    assert shared[EXCHANGE] == pytest.approx(32 * (4 * rounds * link.latency_s + sent / link.bandwidth_bytes_per_s))
    assert shared[WEIGHTS] < alone[WEIGHTS]


@pytest.mark.parametrize("change", ["memory", "flops", "link"])
def test_faster_hardware_is_never_slower(change: str):
    device, link = PLAIN.device, PLAIN.intra_link
    faster = {
        "memory": {"device": device.model_copy(update={"memory_bandwidth_bytes_per_s": 2 * 3350e9})},
        "flops": {"device": device.model_copy(update={"peak_flops_per_s": {"bf16": 2 * 989e12}})},
        "link": {"intra_link": link.model_copy(update={"bandwidth_bytes_per_s": 2 * link.bandwidth_bytes_per_s})},
    }
    for work in (Work(1, 64, num_rows=1), Work(64, 2048, 1024, 512, 64)):
        old, new = (
            StepCosts(SMALL, Layout(tp=2), c).step_s(work) for c in (PLAIN, PLAIN.model_copy(update=faster[change]))
        )
        assert new <= old


# --- a server ----------------------------------------------------------------------------------------------


def served(layout: Layout | None = None, model: ModelSpec = SMALL) -> StepCosts:
    return StepCosts(model, layout or Layout(step_tokens=256, max_running=128), PLAIN)


def run(
    costs: StepCosts, requests: Requests, rate_per_s: float, count: int, seed: int = 0
) -> tuple[float, float, float]:
    """(mean time to the first token, mean time between tokens, mean sequences that decode) of a server that runs step
    by step: those that decode first, then prompts in the order in which they came."""
    rng = random.Random(seed)
    now, arrivals = 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate_per_s)
        arrivals.append(now)
    now, at, decoding = 0.0, 0, []  # decoding: [tokens left, when it came, first token]
    waiting: list[list[float]] = []  # [tokens left, when it came]
    first, between, sequence_s = [], [], 0.0
    while at < count or waiting or decoding:
        if not waiting and not decoding:
            now = max(now, arrivals[at])
        while at < count and arrivals[at] <= now:
            waiting.append([requests.prompt_tokens, arrivals[at]])
            at += 1
        budget, taken, done = costs.layout.step_tokens - len(decoding), 0.0, []
        for prompt in waiting:
            part = min(budget - taken, prompt[0])
            taken, prompt[0] = taken + part, prompt[0] - part
            done += [prompt] if prompt[0] == 0 else []
        batch = len(decoding)
        context = requests.prompt_tokens + requests.output_tokens / 2
        keys = (requests.prompt_tokens + 1) / 2 if taken else 0.0
        step_s = costs.step_s(Work(batch, context, taken, keys, batch + len(done)))
        now, sequence_s = now + step_s, sequence_s + batch * step_s
        for sequence in decoding:
            sequence[0] -= 1
        between += [(now - s[1]) / (requests.output_tokens - 1) for s in decoding if s[0] == 0]
        decoding = [s for s in decoding if s[0] > 0]
        first += [now - prompt[1] for prompt in done]
        decoding += [[requests.output_tokens - 1, now] for _ in done if requests.output_tokens > 1]
        waiting = waiting[len(done) :]
    mean = [sum(values) / len(values) if values else 0.0 for values in (first, between)]
    return mean[0], mean[1], sequence_s / now


@pytest.mark.parametrize(("prompt", "output"), [(512, 64), (64, 64), (1024, 8)])
@pytest.mark.parametrize("share", [0.3, 0.8])
def test_the_steady_state_is_that_of_a_server_that_runs(prompt: int, output: int, share: float):
    """The same steps, drawn arrivals: means agree within a tenth between tokens, within a fifth to the first."""
    requests = Requests(prompt_tokens=prompt, output_tokens=output, rate_per_s=1)
    costs = served()
    most = capacity(costs, requests, 1000)
    assert isinstance(most, Capacity)
    rate = share * most.load.rate_per_s
    expected = load_at(costs, requests, rate, most.load)
    ttft_s, tpot_s, batch = run(costs, requests, rate, 800)
    assert expected.rate_per_s == pytest.approx(rate, rel=2e-3)
    assert tpot_s == pytest.approx(expected.tpot_s, rel=0.1)
    assert batch == pytest.approx(rate * (output - 1) * tpot_s, rel=0.1)
    assert ttft_s == pytest.approx(expected.ttft_s, rel=0.2)


def test_a_server_beyond_its_capacity_falls_behind():
    """The negative control of the test above: there the first token takes ever longer."""
    costs = served()
    most = capacity(costs, REQUESTS, 1000)
    assert isinstance(most, Capacity)
    late_s = run(costs, REQUESTS, 1.3 * most.load.rate_per_s, 800)[0]
    assert late_s > 5 * most.load.ttft_s


def test_littles_law_holds():
    found = load(served(), REQUESTS, 10.0)
    assert found is not None
    assert found.rate_per_s * 63 * found.tpot_s == pytest.approx(10.0)
    assert found.mixed_share * found.mixed.num_prompt / found.tpot_s == pytest.approx(512 * found.rate_per_s)


def test_alone_a_request_waits_for_nobody():
    costs = served()
    found = load(costs, REQUESTS, ALONE)
    assert found is not None
    chunk = costs.step_s(Work(0, 544, 256, 256.5, 0.5))
    assert found.ttft_s == pytest.approx(2 * chunk, rel=1e-3)
    assert found.tpot_s == pytest.approx(costs.step_s(Work(1, 544, num_rows=1)), rel=1e-3)


@pytest.mark.parametrize(
    ("change", "max_batch", "limit"),
    [({}, 1000, PROMPTS), ({}, 4, CACHE), ({"max_tpot_s": 6e-5}, 1000, TPOT), ({"max_ttft_s": 4.5e-4}, 1000, TTFT)],
)
def test_each_limit_is_named(change: dict[str, float], max_batch: int, limit: str):
    costs, requests = served(), REQUESTS.model_copy(update=change)
    most = capacity(costs, requests, max_batch)
    assert isinstance(most, Capacity)
    assert most.limit == limit
    free = capacity(costs, REQUESTS, 1000)
    assert isinstance(free, Capacity)
    assert most.load.rate_per_s < free.load.rate_per_s or limit == PROMPTS
    if max_batch == 4:
        assert most.load.num_running <= 4


def test_what_cannot_be_kept_is_said():
    assert capacity(served(), REQUESTS.model_copy(update={"max_ttft_s": 1e-9}), 1000) == TTFT
    assert capacity(served(), REQUESTS.model_copy(update={"max_tpot_s": 1e-9}), 1000) == TPOT


def test_answers_of_one_token():
    """Nobody decodes: the rate follows from the prompts alone."""
    costs, requests = served(), REQUESTS.model_copy(update={"output_tokens": 1})
    most = capacity(costs, requests, 1000)
    assert isinstance(most, Capacity)
    whole = costs.step_s(Work(0, 512.5, 256, 256.5, 0.5))
    assert most.load.rate_per_s == pytest.approx(0.9 / (2 * whole), rel=0.01)
    half = load_at(costs, requests, most.load.rate_per_s / 2, most.load)
    assert half.ttft_s < most.load.ttft_s
    assert replace(half).tpot_s == pytest.approx(whole, rel=0.01)


def test_cpu_ranks_multiply_few_rows_at_the_rates_that_were_measured():
    """Between two of them the logarithms lie on a line; from many rows on it is that of large products."""
    profile = Profile(
        matmul_efficiency=0.5, num_units=1, memory_efficiency=1.0, attention_efficiency=0.5,
        server=Server(few_rows=(("fp32", 1, 2e9), ("fp32", 16, 8e9), ("bf16", 1, 1e12))),
    )  # fmt: skip
    local = load_cluster("local:2")
    device = local.device.model_copy(update={"profile": profile, "peak_flops_per_s": {"fp32": 64e9, "bf16": 1e12}})
    speed = StepCosts(SMALL, Layout(precision="fp32"), local.model_copy(update={"device": device})).speed
    for rows, rate in ((0.5, 1e9), (1, 2e9), (4, 4e9), (16, 8e9), (512, 32e9), (4096, 32e9)):
        assert speed.product_s(rows, 100, 100) == pytest.approx(2 * rows * 100 * 100 / rate)


def test_a_servers_own_code_takes_what_was_measured():
    profile = Profile(
        matmul_efficiency=0.5, num_units=1, memory_efficiency=1.0, attention_efficiency=0.5,
        server=Server(step_s=1e-3, layer_s=1e-4, sequence_s=1e-5),
    )  # fmt: skip
    local = load_cluster("local:2")
    cluster = local.model_copy(update={"device": local.device.model_copy(update={"profile": profile})})
    found = seconds(StepCosts(SMALL, Layout(precision="fp32"), cluster), Work(8, 64, num_rows=8))
    assert found[HOST] == pytest.approx(1e-3 + 4 * 1e-4 + 8 * 1e-5)
    assert seconds(StepCosts(SMALL, Layout(precision="fp32"), local), Work(8, 64, num_rows=8))[HOST] == 0


@pytest.mark.parametrize(("precision", "tokens_per_s"), [("fp32", 82), ("bf16", 164)])
def test_a_model_of_125_million_decodes_no_faster_than_memory(precision: str, tokens_per_s: float):
    """The limit that 32.9 GB/s set to engines for CPUs, for a Llama of about that shape."""
    local, fast = load_cluster("local:1"), {"fp32": 1e15, "bf16": 1e15}
    change = {"memory_bandwidth_bytes_per_s": 32.9e9, "peak_flops_per_s": fast}
    cluster = local.model_copy(update={"device": local.device.model_copy(update=change)})
    costs = StepCosts(load_model("demo-l"), Layout(precision=precision), cluster)
    assert seconds(costs, Work(1, 1, num_rows=1))[WEIGHTS] == pytest.approx(1 / tokens_per_s, rel=0.12)
