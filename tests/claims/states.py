"""Claims about what a rank holds: 1 to 5, 24 to 26, 29, 39, 40, 44, 45."""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.job import Job
from meshwright.core.precision import RECIPES
from meshwright.core.serving import Layout, Requests
from meshwright.core.sources import load_cluster, load_model
from meshwright.core.strategy import Strategy
from meshwright.core.units import format_bytes
from meshwright.cost.kv_cache import kv_token_bytes
from meshwright.cost.memory import memory
from meshwright.cost.zero import STAGES, zero_states_bytes, zero_traffic
from meshwright.planner.advise import advise_on, facts
from meshwright.planner.price import price
from meshwright.planner.serving_search import forecast
from tests.claims.claim import Answer, Claim, gigabytes

N = 70_000_000_000
GPU_BYTES = 80 * 10**9
SIXTEEN = RECIPES["bf16-16"]
LLAMA = load_model("llama-2-70b")
JOB = Job(seq_length=4096, global_batch_size=64)
D8_T4_P2 = Strategy(
    dp=8, tp=4, pp=2, micro_batch_size=1, num_micro_batches=8, precision="bf16-16", recompute="full"
)  # fmt: skip
FIRST = {"pp": 0, "dp": 0, "tp": 0}


def held(num_parameters: int, dp: int, stage: int) -> int:
    return sum(zero_states_bytes(num_parameters, dp, stage, SIXTEEN).values())


def weights() -> Answer:
    num_bytes = zero_states_bytes(N, 1, 0, SIXTEEN)["parameters"]
    return {"GB": gigabytes(num_bytes), "GiB": num_bytes / 2**30, "printed": format_bytes(num_bytes)}


def terms() -> Answer:
    parts = memory(LLAMA, JOB, D8_T4_P2, FIRST)
    here = [size for name, size in parts.to_dict().items() if name not in ("host_bytes", "disk_bytes")]
    return {"terms": len(here), "total − Σ terms": parts.total_bytes - sum(here)}


def training_states() -> Answer:
    return {
        "GB": gigabytes(held(N, 1, 0)),
        "GiB": held(N, 1, 0) / 2**30,
        "13 GPUs of 80 GB hold them": held(N, 13, 3) <= GPU_BYTES,
        "14 do": held(N, 14, 3) <= GPU_BYTES,
    }


def stage(number: int) -> Answer:
    return {"GB at D=64": gigabytes(held(N, 64, number)), "GB at D=1": gigabytes(held(N, 1, number))}


def fsdp() -> Answer:
    replicated, freed, kept = (
        zero_traffic(N, 64, number, SIXTEEN, gather_again=again).wire_bytes
        for number, again in ((0, True), (3, True), (3, False))
    )
    return {
        "freed after forward / DP": freed / replicated,
        "kept / DP": kept / replicated,
    }


def four_ways() -> Answer:
    real = memory(LLAMA, JOB, Strategy(tp=4, precision="bf16-16", num_micro_batches=64), FIRST)
    ideal = zero_states_bytes(N // Strategy(tp=4).tp, 1, 0, SIXTEEN)["parameters"]
    return {"GB": gigabytes(ideal), "GiB": ideal / 2**30, "Llama-2-70B GB": gigabytes(real.parameters_bytes)}


def training_and_inference() -> Answer:
    known = facts(LLAMA, load_cluster("8x8xh100"), JOB)
    account = ({"G4", "G5"} & {rule.id for rule in advise_on(replace(known, is_training=t))} for t in (True, False))
    training, inference = ("".join(sorted(ids)) for ids in account)
    return {
        "training GB": gigabytes(held(N, 1, 0)),
        "inference GB": gigabytes(zero_states_bytes(N, 1, 0, SIXTEEN)["parameters"]),
        "rules": (training, inference),
    }


def on_64() -> Answer:
    """What is claimed for 70·10⁹ parameters, and whether Llama-2-70B fits 8 nodes of 8 H100 with and without ZeRO-1."""
    per_rank = N // D8_T4_P2.tp // D8_T4_P2.pp
    ways = {f"{'ZeRO-' if s else 'DP, ZeRO-'}{s} GB": gigabytes(held(per_rank, D8_T4_P2.dp, s)) for s in STAGES}
    cluster = load_cluster("8x8xh100")
    fits = (price(LLAMA, cluster, JOB, D8_T4_P2.model_copy(update={"zero": z})).fits for z in (0, 1))
    return {**ways, "fits 80 GB as stated": next(fits), "with ZeRO-1": next(fits)}


def key_value_cache() -> Answer:
    batch, length = 32, 4096
    whole = LLAMA.model_copy(update={"num_kv_heads": LLAMA.num_heads})
    token, of_all, of_rank = (
        kv_token_bytes(model, Layout(tp=tp).replica) for model, tp in ((LLAMA, 1), (whole, 1), (LLAMA, 4))
    )
    layout = Layout(tp=4, block_size=16, num_blocks=batch * length // 16)
    requests = Requests(prompt_tokens=length - 1, output_tokens=1, rate_per_s=0.1)
    planned = forecast(LLAMA, load_cluster("4xh100"), requests, layout)
    return {
        "bytes a token": token,
        "GB at B=32, S=4096": gigabytes(token * batch * length),
        "planned GB": gigabytes(4 * planned.cache_bytes),
        "with a key/value head for each query head": of_all,
        "per rank at T=4": of_rank,
    }


CLAIMS = [
    Claim(
        1, "weights take 2N bytes", ("core.precision.RECIPES",),
        lambda _: {"16 bit": SIXTEEN.parameter_bytes, "32 bit": RECIPES["fp32"].parameter_bytes},
        {"16 bit": 2, "32 bit": 4},
        "holds for 16-bit weights",
    ),
    Claim(
        2, "the weights of 70B take 140 GB", ("cost.zero.zero_states_bytes", "core.units.format_bytes"),
        lambda _: weights(),
        {"GB": 140.0, "GiB": 130.385, "printed": "140 GB"},
        "holds in decimal GB; the two units must not be mixed", tolerance=1e-5,
    ),
    Claim(
        3, "memory = parameters + gradients + optimizer + activations + buffers", ("cost.memory.memory",),
        lambda _: terms(),
        {"terms": 6, "total − Σ terms": 0},
        "holds; every forecast and measurement has these categories, and working memory for what ZeRO-2 and 3 gather "
        "and reduce",
    ),
    Claim(
        4, "mixed-precision Adam takes 2+2+4+4+4 = 16 bytes per parameter", ("core.precision.RECIPES",),
        lambda _: {name: RECIPES[name].adamw_total_bytes for name in ("bf16-16", "bf16", "bf16-20")},
        {"bf16-16": 16, "bf16": 18, "bf16-20": 20},
        "one recipe of several: fp32 gradients make it 18, a second copy of them during the step 20",
    ),
    Claim(
        5, "the training states of 70B take 1120 GB", ("cost.zero.zero_states_bytes",),
        lambda _: training_states(),
        {"GB": 1120.0, "GiB": 1043.081, "13 GPUs of 80 GB hold them": False, "14 do": True},
        "holds, before activations", tolerance=1e-6,
    ),
    Claim(
        24, "ZeRO-1 holds P + G + O/p", ("cost.zero.zero_states_bytes",),
        lambda _: stage(1), {"GB at D=64": 293.125, "GB at D=1": 1120.0}, "holds",
    ),
    Claim(
        25, "ZeRO-2 holds P + G/p + O/p", ("cost.zero.zero_states_bytes",),
        lambda _: stage(2), {"GB at D=64": 155.3125, "GB at D=1": 1120.0},
        "holds; buckets on their way come on top",
    ),
    Claim(
        26, "ZeRO-3 holds (P + G + O)/p", ("cost.zero.zero_states_bytes",),
        lambda _: stage(3), {"GB at D=64": 17.5, "GB at D=1": 1120.0},
        "holds; layers that are gathered come on top",
    ),
    Claim(
        29, "FSDP is ZeRO-3 in PyTorch", ("cost.zero.zero_traffic", "core.strategy.Strategy"),
        lambda _: fsdp(),
        {"freed after forward / DP": 1.5, "kept / DP": 1.0},
        "by default; parameters kept for backward make it as cheap as ZeRO-2 (`keep_gathered`), and hybrid sharding is "
        "a third way (`shard_over = \"node\"`)",
    ),
    Claim(
        39, "the key/value cache takes 2 · L · B · S · H_kv · bytes",
        ("cost.kv_cache.kv_token_bytes", "planner.serving_search.forecast"),
        lambda _: key_value_cache(),
        {
            "bytes a token": 327_680, "GB at B=32, S=4096": 42.94967296, "planned GB": 42.94967296,
            "with a key/value head for each query head": 2_621_440, "per rank at T=4": 81_920,
        },
        "holds for whole, grouped and single key/value heads; latent attention keeps less",
    ),
    Claim(
        40, "with T=4 each rank holds 140/4 = 35 GB of weights", ("cost.zero.zero_states_bytes", "cost.memory.memory"),
        lambda _: four_ways(),
        {"GB": 35.0, "GiB": 32.5963, "Llama-2-70B GB": 34.490302464},
        "holds up to norms, which every rank holds whole", tolerance=1e-6,
    ),
    Claim(
        44, "training holds parameters, gradients and optimizer; inference parameters and key/value cache",
        ("cost.zero.zero_states_bytes", "planner.advise.advise_on"),
        lambda _: training_and_inference(),
        {"training GB": 1120.0, "inference GB": 140.0, "rules": ("G4", "G5")},
        "holds; inference works with activations too, which `plan --serve` counts",
    ),
    Claim(
        45, "70B trains on 64 GPUs as D=8, T=4, P=2, ZeRO being optional",
        ("cost.zero.zero_states_bytes", "planner.price.price"),
        lambda _: on_64(),
        {
            "DP, ZeRO-0 GB": 140.0, "ZeRO-1 GB": 48.125, "ZeRO-2 GB": 32.8125, "ZeRO-3 GB": 17.5,
            "fits 80 GB as stated": False, "with ZeRO-1": True,
        },
        "**as stated it does not fit 80 GB**: without ZeRO the states alone take 140 GB per GPU; ZeRO is required",
    ),
]  # fmt: skip
