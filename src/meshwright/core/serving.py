"""ServingPlan: model × cluster × requests × layout, the file that `meshwright serve` reads.

A layout is `replicas` copies of the model, each divided over tp × pp ranks as in training. With `ep` > 1 so many
neighbouring replicas share the experts of every layer of a mixture, and exchange tokens.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationInfo, field_validator, model_validator

from meshwright.core.cluster import ClusterSpec
from meshwright.core.errors import InputError, RuleError
from meshwright.core.job import Job
from meshwright.core.layouts import Expert
from meshwright.core.model import ModelSpec
from meshwright.core.rules import Violation, violations
from meshwright.core.strategy import Precision, Strategy
from meshwright.core.units import counted
from meshwright.core.values import MAX_SIZE, Value, read_plan, write_text

MAX_RATE_PER_S = 1e9
"""Of requests; more are a slip of a finger."""


class Requests(Value):
    """What is to be answered, apart from how the model is divided. All requests are alike."""

    prompt_tokens: int = Field(gt=0, le=MAX_SIZE)
    output_tokens: int = Field(gt=0, le=MAX_SIZE)
    """Of one answer."""
    rate_per_s: float = Field(gt=0, le=MAX_RATE_PER_S)
    """Requests that arrive each second, at moments independent of each other, over all replicas."""
    max_ttft_s: float | None = Field(default=None, gt=0)
    """What the mean time to the first token may be; None: anything."""
    max_tpot_s: float | None = Field(default=None, gt=0)
    """Likewise between the tokens of an answer."""

    @property
    def length(self) -> int:
        """Tokens of prompt and answer together."""
        return self.prompt_tokens + self.output_tokens


class Layout(Value):
    """How a model is divided to be served, and the sizes of each replica's engine."""

    replicas: int = Field(default=1, gt=0, le=MAX_SIZE)
    """Copies of the model, each of which answers its own requests."""
    tp: int = Field(default=1, gt=0, le=MAX_SIZE)
    """Tensor-parallel ranks of a replica: they share every layer."""
    pp: int = Field(default=1, gt=0, le=MAX_SIZE)
    """Pipeline ranks of a replica: a step passes them one after the other."""
    ep: int = Field(default=1, gt=0, le=MAX_SIZE)
    """Neighbouring replicas that share the experts of a mixture."""
    precision: Precision = "bf16"
    """Its parameters' dtype is that of weights, activations, keys and values."""
    layers_per_stage: tuple[int, ...] | None = None
    """None splits them evenly, extra layers to the inner stages."""
    block_size: int = Field(default=16, gt=0, le=4096)
    """Tokens of one block of the key/value cache."""
    num_blocks: int = Field(default=1024, gt=0, le=MAX_SIZE)
    """Blocks of the cache on each rank."""
    step_tokens: int = Field(default=256, gt=0, le=MAX_SIZE)
    """Tokens that one step computes at most: one of each running sequence, the rest is for prompts."""
    max_running: int = Field(default=64, gt=0, le=MAX_SIZE)
    """Sequences of a replica that take part in a step at most."""

    @property
    def num_devices(self) -> int:
        """Of all replicas, one rank each."""
        return self.replicas * self.tp * self.pp

    @property
    def replica(self) -> Strategy:
        """How one replica is divided."""
        return Strategy(tp=self.tp, pp=self.pp, precision=self.precision, layers_per_stage=self.layers_per_stage)

    @property
    def strategy(self) -> Strategy:
        """All replicas, as ranks of dp."""
        return self.replica.model_copy(update={"dp": self.replicas, "expert": Expert(degree=self.ep)})

    def describe(self) -> str:
        """Short name, for tables: `R4 T2 P1 bf16`, of a mixture `R4 E4 T2 P1 bf16`."""
        return f"R{self.replicas}{f' E{self.ep}' if self.ep > 1 else ''} T{self.tp} P{self.pp} {self.precision}"


class ServingPlan(Value):
    """What is served, and how. Cannot be built around an illegal layout (raises RuleError)."""

    model: ModelSpec
    """What is served."""
    cluster: ClusterSpec
    """On what."""
    requests: Requests
    """To whom."""
    layout: Layout
    """How it is divided."""
    why: str = ""
    """The planner's explanation, in words."""

    @field_validator("requests")
    @classmethod
    def _short_enough(cls, requests: Requests, info: ValidationInfo) -> Requests:
        model = info.data.get("model")
        if model is not None:
            check_length(model, requests)
        return requests

    @model_validator(mode="after")
    def _legal(self) -> ServingPlan:
        check_layout(self.layout, self.model, self.cluster, self.requests)
        return self

    @property
    def strategy(self) -> Strategy:
        """All replicas, as ranks of dp: what an engine takes."""
        return self.layout.strategy

    def save(self, path: Path | str) -> None:
        """Write as TOML, whole or not at all."""
        write_text(path, self.to_toml())

    @classmethod
    def load(cls, path: Path | str) -> ServingPlan:
        """Read a plan file. Raises InputError, also where it is one of a training, or RuleError."""
        data = read_plan(path)
        if "job" in data and "requests" not in data:
            raise InputError(f"{path}: a plan of a training, not for serving; write one with `meshwright plan --serve`")
        return cls.parse(data, str(path))


def is_serving(path: Path | str) -> bool:
    """Whether a plan file is one for serving. Raises InputError where it cannot be read, or is empty."""
    return "requests" in read_plan(path)


def check_length(model: ModelSpec, requests: Requests) -> None:
    """Raises InputError where the model cannot hold a prompt with its answer."""
    context = min(model.max_positions, model.sliding_window or model.max_positions)
    if requests.length <= context:
        return
    asked = f"--prompt {requests.prompt_tokens} and --output {requests.output_tokens} are {requests.length} tokens"
    left = context - requests.output_tokens
    near = f"--prompt {left}" if left > 0 else f"--output {max(1, context - requests.prompt_tokens)}"
    raise InputError(f"{asked}, but `{model.name}` holds {context}, answer included; nearest: {near}")


OF_TRAINING = ("world",)
"""Rules that say nothing about serving: replicas may leave devices free."""


def broken_rules(layout: Layout, model: ModelSpec, cluster: ClusterSpec, requests: Requests) -> list[Violation]:
    """The rules of :mod:`meshwright.core.rules` that a layout breaks, in table order."""
    job = Job(seq_length=requests.length, global_batch_size=layout.replicas)
    found = violations(layout.strategy, model, cluster, job)
    return [violation for violation in found if violation.rule.id not in OF_TRAINING]


def check_layout(layout: Layout, model: ModelSpec, cluster: ClusterSpec, requests: Requests) -> None:
    """Raise RuleError for an illegal layout: the rule and the numbers."""
    needed, have = layout.num_devices, cluster.num_devices
    if needed > have:
        per_replica = layout.tp * layout.pp
        room = have // per_replica
        near = f"nearest: replicas={room}" if room else f"a replica alone takes {counted(per_replica, 'device')}"
        raise RuleError(
            f"replicas={layout.replicas} × tp={layout.tp} × pp={layout.pp} = {counted(needed, 'rank')}, but cluster "
            f"`{cluster.name}` has {have}; {near}",
            "world",
        )
    if broken := broken_rules(layout, model, cluster, requests):
        raise RuleError("; ".join(map(str, broken)), broken[0].rule.id)
    if layout.max_running > layout.step_tokens:
        raise RuleError(
            f"max_running={layout.max_running} is more than step_tokens={layout.step_tokens}: a step computes a token "
            f"of each running sequence; nearest: step_tokens={layout.max_running}",
            "step",
        )
    needed_blocks = -(-requests.length // layout.block_size)
    if layout.num_blocks < needed_blocks:
        raise RuleError(
            f"num_blocks={layout.num_blocks} of {layout.block_size} tokens hold no prompt with its answer, "
            f"{requests.length} tokens; nearest: num_blocks={needed_blocks}",
            "cache",
        )
