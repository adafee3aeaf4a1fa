"""Claims about pipelines: 16 to 23."""

from __future__ import annotations

from itertools import product

from meshwright.core.job import Job
from meshwright.core.sources import load_model
from meshwright.core.strategy import Strategy
from meshwright.cost.memory import activations_bytes
from meshwright.cost.params import local_parameters
from meshwright.cost.traffic import step_traffic
from meshwright.schedule.build import program
from meshwright.schedule.closed_form import bubble_fraction, bubble_of_ideal, peak_live
from meshwright.schedule.evaluation import evaluation_program
from meshwright.sim.clock import UnitCosts, simulate
from tests.claims.claim import Answer, Claim
from tests.claims.states import FIRST

LLAMA = load_model("llama-2-70b")
FLUSHING = ("gpipe", "1f1b")


def stages_of_48() -> Answer:
    layers = Strategy(pp=4).stage_layers(48)
    return {"layers": ", ".join(f"{stage[0]}–{stage[-1]}" for stage in layers)}


def per_stage() -> Answer:
    def held(name: str, pp: int) -> list[int]:
        return [local_parameters(load_model(name), Strategy(pp=pp), {**FIRST, "pp": stage}) for stage in range(pp)]

    total = LLAMA.num_parameters
    return {
        "N/p, 10⁹": total / 4 / 1e9,
        "Llama-2-70B, P=4, 10⁹": tuple(num / 1e9 for num in held(LLAMA.name, 4)),
        "GPT-2, P=2: held twice": sum(held("gpt2", 2)) - load_model("gpt2").num_parameters,
    }


def forward_table(num_micro_batches: int) -> tuple[float, float]:
    """(slots, idle share) of forward alone on 4 ranks."""
    timeline = simulate(evaluation_program(Strategy(pp=4), num_micro_batches), UnitCosts())
    return float(timeline.makespan_s), timeline.bubble_fraction


def clock_bubble(name: str, num_stages: int, num_micro_batches: int) -> float:
    return simulate(program(name, num_stages, num_micro_batches), UnitCosts()).bubble_fraction


def closed_form_and_clock() -> Answer:
    cases = list(product(FLUSHING, range(1, 6), range(1, 9)))
    return {
        "cases": len(cases),
        "closed form = clock": all(abs(bubble_fraction(*case) - clock_bubble(*case)) < 1e-12 for case in cases),
        "p=4, m=16, of ideal time": bubble_of_ideal("1f1b", 4, 16),
    }


def bubble(num_micro_batches: int) -> Answer:
    return {
        "closed form": bubble_fraction("1f1b", 4, num_micro_batches),
        **{f"clock, {name}": clock_bubble(name, 4, num_micro_batches) for name in FLUSHING},
    }


def live() -> Answer:
    timed = {name: simulate(program(name, 4, 8), UnitCosts()) for name in FLUSHING}
    return {
        **{f"{name}, p=4, m=8": peak_live(name, 4, 8) for name in FLUSHING},
        "same in the clock": all(timeline.peak_live == peak_live(name, 4, 8) for name, timeline in timed.items()),
        "bubbles equal": timed["gpipe"].bubble_fraction == timed["1f1b"].bubble_fraction,
    }


def more_micro_batches() -> Answer:
    """A fixed global batch of 64 sequences in 16 or in 64 micro-batches; then 16 or 64 of one sequence each."""

    def split(schedule: str, size: int, count: int) -> Strategy:
        values = {
            "pp": 4,
            "schedule": schedule,
            "micro_batch_size": size,
            "num_micro_batches": count,
            "precision": "bf16",
        }
        return Strategy.model_validate(values)

    def kept(schedule: str, size: int, count: int) -> int:
        job = Job(seq_length=4096, global_batch_size=size * count)
        return activations_bytes(LLAMA, job, split(schedule, size, count), 0)

    reduced = [step_traffic(LLAMA, split("1f1b", *how), FIRST).wire_bytes for how in ((4, 16), (1, 64))]
    return {
        "1f1b, same batch, m 16 → 64": kept("1f1b", 1, 64) / kept("1f1b", 4, 16),
        "gpipe, same batch": kept("gpipe", 1, 64) / kept("gpipe", 4, 16),
        "1f1b, larger batch": kept("1f1b", 1, 64) / kept("1f1b", 1, 16),
        "gpipe, larger batch": kept("gpipe", 1, 64) / kept("gpipe", 1, 16),
        "bytes per step": reduced[1] / reduced[0],
    }


CLAIMS = [
    Claim(
        16, "48 layers on 4 GPUs: 0–11, 12–23, 24–35, 36–47", ("core.strategy.Strategy.stage_layers",),
        lambda _: stages_of_48(), {"layers": "0–11, 12–23, 24–35, 36–47"}, "holds",
    ),
    Claim(
        17, "each GPU has N/p parameters", ("cost.params.local_parameters",), lambda _: per_stage(),
        {
            "N/p, 10⁹": 17.244162048, "Llama-2-70B, P=4, 10⁹": (17.375232, 17.113088, 17.113088, 17.37524019),
            "GPT-2, P=2: held twice": 38_597_376,
        },
        "on average: embedding and head make the ends heavier, and a tied embedding is held by both", tolerance=1e-9,
    ),
    Claim(
        18, "a table of 7 time slots on 4 GPUs shows the pipeline with one batch", ("sim.clock.simulate",),
        lambda _: {"m=4: slots, idle": forward_table(4), "m=1": forward_table(1)},
        {"m=4: slots, idle": (7.0, 3 / 7), "m=1": (4.0, 3 / 4)},
        "**the caption is wrong**: the table is the forward of 4 micro-batches; with one batch only one GPU works",
    ),
    Claim(
        19, "the bubble is (p−1)/(m+p−1)", ("schedule.closed_form.bubble_fraction", "sim.clock.simulate"),
        lambda _: closed_form_and_clock(),
        {"cases": 80, "closed form = clock": True, "p=4, m=16, of ideal time": 3 / 16},
        "holds for GPipe and 1F1B as share of the whole time; (p−1)/m is the share of ideal time",
    ),
    Claim(
        20, "p=4, m=1: 3/4", ("schedule.closed_form.bubble_fraction", "sim.clock.simulate"),
        lambda _: bubble(1), {"closed form": 0.75, "clock, gpipe": 0.75, "clock, 1f1b": 0.75}, "holds",
    ),
    Claim(
        21, "p=4, m=16: 3/19", ("schedule.closed_form.bubble_fraction", "sim.clock.simulate"),
        lambda _: bubble(16), {"closed form": 3 / 19, "clock, gpipe": 3 / 19, "clock, 1f1b": 3 / 19}, "holds",
    ),
    Claim(
        22, "GPipe keeps more activations, 1F1B fewer", ("schedule.closed_form.peak_live", "sim.clock.simulate"),
        lambda _: live(),
        {
            "gpipe, p=4, m=8": (8, 8, 8, 8), "1f1b, p=4, m=8": (4, 3, 2, 1), "same in the clock": True,
            "bubbles equal": True,
        },
        "holds: m against min(p−r, m) micro-batches on rank r; the bubble is the same",
    ),
    Claim(
        23, "more micro-batches may affect the optimizer and memory",
        ("cost.memory.activations_bytes", "cost.traffic.step_traffic"), lambda _: more_micro_batches(),
        {
            "1f1b, same batch, m 16 → 64": 0.25, "gpipe, same batch": 1.0, "1f1b, larger batch": 1.0,
            "gpipe, larger batch": 4.0, "bytes per step": 1.0,
        },
        "with a fixed global batch the update is the same, and 1F1B's memory falls; it does not grow with m",
    ),
]  # fmt: skip
