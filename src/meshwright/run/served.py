"""From what a user names to a model that can be served: a Hugging Face folder, or a training run of any layout.

Each rank reads only its own boxes of the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from meshwright.checkpoint import Piece, load
from meshwright.core.errors import InputError, UnsupportedError
from meshwright.core.model import ModelSpec
from meshwright.core.placement import Placement
from meshwright.core.plan import Plan
from meshwright.core.serving import ServingPlan
from meshwright.core.sources import load_model
from meshwright.core.strategy import Strategy
from meshwright.core.values import parse_json, read_text
from meshwright.models.build import build
from meshwright.models.hf import HFCheckpoint
from meshwright.parallel.states import DTYPES
from meshwright.run.folder import RunFolder
from meshwright.serve.engine import Engine
from meshwright.serve.options import ServeOptions
from meshwright.serve.servable import served_strategy
from meshwright.train.prepare import load_prepared
from meshwright.train.tokenizer import CONFIG_FILE, TOKENIZER_FILE, end_of_text_id, load_tokenizer

TEMPLATE_FILE = "chat_template.jinja"
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


@dataclass(frozen=True, slots=True)
class Served:
    """A model, and what its requests need."""

    path: Path
    spec: ModelSpec
    precision: str
    """The recipe with the dtype of the stored weights."""
    tokenizer: Tokenizer | None
    end_tokens: tuple[int, ...]
    template: str | None
    """The model's own chat template (Jinja)."""
    special: dict[str, str]
    """`bos_token`, `eos_token` and others, for the template."""
    is_run: bool

    def engine(
        self,
        plan: Plan | ServingPlan | None = None,
        options: ServeOptions | None = None,
        replicas: int | None = None,
    ) -> Engine:
        """An engine with the weights. Every rank builds one. With `replicas`, so many instead of the plan's.

        Raises:
            InputError: a plan of another model.
            UnsupportedError: a plan that cannot be served.
            CheckpointError: weights that are missing or damaged.
        """
        strategy = served_strategy(plan, self.precision, replicas)
        self.check_plan(plan)
        return Engine(
            build(self.spec),
            strategy,
            options,
            tokenizer=self.tokenizer,
            end_tokens=self.end_tokens,
            special_tokens=not self.is_run,  # a run was trained on documents without them
            weights=self.read,
        )

    def check_plan(self, plan: Plan | ServingPlan | None) -> None:
        """Raises InputError where it is of another model."""
        if plan is not None and plan.model.parameters() != self.spec.parameters():
            raise InputError(f"the plan is for `{plan.model.name}`, whose parameters are not those of {self.path}")

    def read(self, held: tuple[Placement, ...]) -> Iterable[torch.Tensor]:
        """What is stored of these boxes, in order. Raises CheckpointError."""
        return self._read_run(held) if self.is_run else self._read_hf(held)

    def _read_hf(self, held: tuple[Placement, ...]) -> Iterator[torch.Tensor]:
        params = {param.name: param for param in (*self.spec.parameters(), *self.spec.router_biases())}
        with HFCheckpoint(self.path, self.spec) as checkpoint:
            for placement in held:
                yield checkpoint.read(params[placement.name], placement.box)

    def _read_run(self, held: tuple[Placement, ...]) -> list[torch.Tensor]:
        dtype = DTYPES[Strategy.model_validate({"precision": self.precision}).recipe.parameter]
        wide = {param.name for param in self.spec.router_biases()}
        values = [torch.empty(p.box.sizes, dtype=torch.float32 if p.name in wide else dtype) for p in held]
        pieces = [Piece(f"parameters/{p.name}", p.shape, p.box, v) for p, v in zip(held, values, strict=True)]
        load(RunFolder(self.path).checkpoints, pieces)
        return values


def open_model(path: Path) -> Served:
    """What stands at `path`, without its weights.

    Raises:
        InputError: neither a Hugging Face folder nor a training run.
    """
    if RunFolder(path).plan_path.exists():
        return _open_run(RunFolder(path))
    if (path / "config.json").exists():
        return _open_hf(path)
    if not path.is_dir():
        found = "a file" if path.exists() else "there is no such folder"
        raise InputError(f"{path}: {found}; name the folder of a Hugging Face model or of a training run")
    raise InputError(
        f"{path}: neither a Hugging Face folder (no config.json in it) nor a training run (no plan.toml in it); name "
        "one that `meshwright train` or `meshwright export` wrote"
    )


def _open_run(run: RunFolder) -> Served:
    plan, data = run.plan(), load_prepared(run.data)
    tokenizer = data.tokenizer()
    config_file = run.data / CONFIG_FILE
    config = parse_json(read_text(config_file), str(config_file)) if config_file.exists() else {}
    return Served(
        run.path, plan.model, plan.strategy.precision, tokenizer, (data.end_of_text,), config.get("chat_template"),
        _special(config), is_run=True,
    )  # fmt: skip


def _open_hf(path: Path) -> Served:
    config = parse_json(read_text(path / "config.json"), str(path / "config.json"))
    spec = load_model(str(path))
    tokenizer: Tokenizer | None = None
    tokenizer_config: dict[str, Any] = {}
    if (path / TOKENIZER_FILE).exists():
        tokenizer, tokenizer_config = load_tokenizer(path)
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if stored not in _DTYPES:
        raise UnsupportedError(f"{path}: weights in {stored} cannot be served; convert them to bfloat16 or float32")
    ends = _end_tokens(path, config, tokenizer, tokenizer_config)
    template_file = path / TEMPLATE_FILE
    template = read_text(template_file) if template_file.exists() else tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several by name
        template = next((one["template"] for one in template if one.get("name") == "default"), None)
    return Served(path, spec, _DTYPES[stored], tokenizer, ends, template, _special(tokenizer_config), is_run=False)


def _end_tokens(
    path: Path, config: dict[str, Any], tokenizer: Tokenizer | None, tokenizer_config: dict[str, Any]
) -> tuple[int, ...]:
    """By generation_config.json, else config.json, else the tokenizer."""
    file = path / "generation_config.json"
    generation = parse_json(read_text(file), str(file)) if file.exists() else {}
    for found in (generation.get("eos_token_id"), config.get("eos_token_id")):
        if isinstance(found, int):
            return (found,)
        if isinstance(found, list) and found:
            return tuple(found)
    try:
        return () if tokenizer is None else (end_of_text_id(tokenizer, tokenizer_config),)
    except InputError:
        return ()


def _special(config: dict[str, Any]) -> dict[str, str]:
    """Name → text of the special tokens of a tokenizer_config.json."""
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    contents = {name: v.get("content") if isinstance(v, dict) else v for name, v in named.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}
