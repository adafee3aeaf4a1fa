"""Text on the ranks of a plan: the tokens of one process, whatever kind of tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from meshwright.core.errors import InputError
from meshwright.core.plan import Plan
from meshwright.core.strategy import Strategy
from meshwright.models.generate import generate
from meshwright.models.hf import export
from meshwright.run.generate import GridDecoder, check_prompt, divided
from meshwright.run.served import open_model
from meshwright.serve.options import ServeOptions
from meshwright.serve.request import SamplingParams
from meshwright.train.tokenizer import TOKENIZER_FILE
from tests.models.tiny import SPECS, random_model, random_tokens
from tests.parallel.layouts import make_plan

KINDS: dict[str, dict[str, Any]] = {
    "2d": {"tp": 4, "tensor": {"kind": "2d"}, "micro_batch_size": 2, "dp": 2, "zero": 1},
    "2.5d": {"tp": 8, "tensor": {"kind": "2.5d", "depth": 2}, "micro_batch_size": 4, "recompute": "full"},
    "3d": {"tp": 8, "tensor": {"kind": "3d"}, "micro_batch_size": 4},
    "2d pp": {"tp": 4, "tensor": {"kind": "2d"}, "pp": 2, "micro_batch_size": 2, "num_micro_batches": 2},
}
GREEDY, DRAWN = SamplingParams(max_tokens=6, temperature=0.0), SamplingParams(max_tokens=6, seed=5, top_k=7)
NAME = "qwen3-wide-heads"


def answers(rank: int, world: int, folder: Path, text: str) -> list[list[int]]:
    """Greedy, and drawn."""
    served = open_model(folder)
    decoder = GridDecoder(served, Plan.from_toml(text))
    prompt = random_tokens(served.spec, 1, 5)[0].tolist()
    return [decoder.answer(prompt, params).tokens for params in (GREEDY, DRAWN)]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_on_a_grid_are_those_of_one_process(ranks: Callable[..., Any], tmp_path: Path, kind: str) -> None:
    model = random_model(SPECS[NAME])
    export(tmp_path, model.spec, model.named_parameters())
    served = open_model(tmp_path)
    plan = divided(make_plan(served.spec, **{"precision": "fp32", **KINDS[kind]}))
    prompt = random_tokens(served.spec, 1, 5)
    engine = served.engine(options=ServeOptions(num_blocks=4))
    expected = [engine.generate([prompt[0].tolist()], params)[0][0].tokens for params in (GREEDY, DRAWN)]
    assert expected[0] == generate(model, prompt, 6, temperature=0)[0, 5:].tolist()
    assert expected[0] != expected[1]
    for found in ranks(answers, plan.strategy.world_size, tmp_path, plan.to_toml()):
        assert found == expected


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads what is mapped in /proc")
def test_files_of_weights_are_left_once_they_are_read(tmp_path: Path) -> None:
    model = random_model(SPECS[NAME])
    export(tmp_path, model.spec, model.named_parameters())
    engine = open_model(tmp_path).engine(options=ServeOptions(num_blocks=4))
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(), "all of the file stays in memory"
    assert engine.generate([[1, 2, 3]], GREEDY)


def test_a_prompt_is_refused_before_ranks_start(tmp_path: Path) -> None:
    model = random_model(SPECS[NAME])
    export(tmp_path, model.spec, model.named_parameters())
    letters = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    letters.pre_tokenizer = WhitespaceSplit()
    letters.save(str(tmp_path / TOKENIZER_FILE))
    plan, most = divided(make_plan(model.spec, **KINDS["2d"])), model.spec.max_positions
    assert check_prompt(tmp_path, "a " * (most - 1), GREEDY, plan)[1] == [0] * (most - 1)
    for prompt, words in (("a " * most, f"the prompt has {most} tokens, but the model's context"), ("", "is empty")):
        with pytest.raises(InputError, match=words):
            check_prompt(tmp_path, prompt, GREEDY, plan)


def test_of_a_plan_only_what_divides_the_model_counts() -> None:
    plan = make_plan(SPECS["llama"], **KINDS["2d"])
    assert divided(plan).strategy == Strategy(tp=4, tensor={"kind": "2d"}, micro_batch_size=2, precision="fp64")
