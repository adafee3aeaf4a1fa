"""Text from a trained run or a Hugging Face folder: by the engine that serves it, or by a training's own forward.

    no plan, or one whose ranks divide a layer in one dimension     the engine, with its key/value cache
    a plan with a grid of ranks (2D, 2.5D, 3D)                      the whole text in each step, as in training: there
                                                                    is no cache that lies on a grid

Of a plan only what divides the model counts: tp, its kind, and pp with its layers. Tokens are those of one process.
"""

from __future__ import annotations

from pathlib import Path

import torch

from meshwright.comm.mesh import Mesh
from meshwright.core.errors import InputError
from meshwright.core.job import Job
from meshwright.core.plan import Plan
from meshwright.core.sources import load_cluster
from meshwright.core.strategy import Strategy
from meshwright.models.build import build
from meshwright.parallel.apply import ParallelModel
from meshwright.run.engine import make_mesh
from meshwright.run.served import Served, open_model
from meshwright.serve.engine import Answer, Engine
from meshwright.serve.options import ServeOptions
from meshwright.serve.request import SamplingParams, check_request, context_of, sequences
from meshwright.serve.sampler import choose
from meshwright.serve.text import encode


def continue_text(path: Path, prompt: str, params: SamplingParams, plan: Plan | None = None) -> str:
    """The prompt and its continuation. With a plan all its ranks call it, and rank 0 gets it; the others may get less.

    Args:
        path: of a training run, or a Hugging Face folder.
        params: how to go on; `max_tokens` and `seed` are given.
        plan: of :func:`divided`; None: one process.

    Raises:
        InputError: a prompt that is empty, no text or too long, a plan of another model, or nothing to serve.
        CheckpointError: no checkpoint there, or a damaged one.
    """
    served, ids = check_prompt(path, prompt, params, plan)
    if plan is None or plan.strategy.tensor.kind == "1d":
        answers = _engine(served, prompt, params, plan).generate([prompt], params)
        answer = answers[0][0] if answers else Answer(())
    else:
        answer = GridDecoder(served, plan).answer(ids, params)
        assert served.tokenizer is not None
        answer.text = served.tokenizer.decode(answer.tokens, skip_special_tokens=True)
    if answer.finish == "error":
        raise InputError("the model's output is not finite: its weights are spoilt; take an earlier checkpoint")
    return prompt + answer.text


def check_prompt(path: Path, prompt: str, params: SamplingParams, plan: Plan | None) -> tuple[Served, list[int]]:
    """What is asked, and the prompt's tokens, before anything is computed. As :func:`continue_text`, raises InputError
    where it cannot be answered."""
    if not prompt:
        raise InputError("the prompt is empty; give --prompt some text")
    served = open_divided(path, plan)
    ids = encode(served.tokenizer, prompt, not served.is_run)
    check_request(ids, params, served.spec.vocab_size, context_of(served.spec), "the model's context")
    return served, ids


def divided(plan: Plan) -> Plan:
    """A plan for its tensor and pipeline ranks alone, and for as few sequences as they can divide.

    Raises RuleError where these alone are no legal layout.
    """
    given = plan.strategy
    layout = {
        "tp": given.tp,
        "tensor": given.tensor,
        "pp": given.pp,
        "precision": given.precision,
        "layers_per_stage": given.layers_per_stage if given.num_parts == given.pp else None,
        "micro_batch_size": given.grid.parts(given.grid.batch_axes),
    }
    strategy = Strategy.model_validate(layout)
    job = Job(seq_length=1, global_batch_size=strategy.micro_batch_size)
    return Plan(model=plan.model, cluster=load_cluster(f"local:{strategy.world_size}"), job=job, strategy=strategy)


def open_divided(path: Path, plan: Plan | None) -> Served:
    """What stands at `path`, without its weights. Raises InputError: nothing to serve, or a plan of another model."""
    served = open_model(path)
    served.check_plan(plan)
    return served


def _engine(served: Served, prompt: str, params: SamplingParams, plan: Plan | None) -> Engine:
    """With a cache for this one text."""
    options = ServeOptions()
    longest = min(served.spec.max_positions, len(prompt.encode(errors="replace")) + 8 + (params.max_tokens or 0))
    return served.engine(plan, options.model_copy(update={"num_blocks": -(-longest // options.block_size)}))


class GridDecoder:
    """A model on a grid of ranks, which computes the whole text for each token.

    Args:
        served: its weights, of which each rank reads its boxes.
        plan: of :func:`divided`.
        mesh: of the run that stands; None: what torchrun describes.

    Raises CheckpointError: weights that are missing or damaged.
    """

    def __init__(self, served: Served, plan: Plan, mesh: Mesh | None = None) -> None:
        self._served = served
        self._mesh = mesh or make_mesh(plan)
        self._model = ParallelModel(build(served.spec), served.spec, plan.strategy, self._mesh, plan.job)
        states = self._model.states
        values = iter(served.read(tuple(slot.placement for _, slot in states.slots())))
        states.fill(lambda _: next(values))

    def answer(self, prompt: list[int], params: SamplingParams) -> Answer:
        """The tokens that the engine would answer; every rank the same. Of n answers the first; no stop strings."""
        (sequence, *_) = sequences(0, prompt, params, params.seed or 0, context_of(self._served.spec), 0.0, None)
        answer, ends = Answer(tuple(prompt), finish="length"), frozenset(self._served.end_tokens)
        while sequence.num_tokens < sequence.max_length:
            tokens = torch.tensor([sequence.tokens(0, sequence.num_tokens)], device=self._mesh.device)
            (choice,) = choose(self._model.next_logits(tokens), [sequence], ends)
            if choice.token is None:
                answer.finish = "error"
                break
            sequence.append(choice.token)
            answer.tokens.append(choice.token)
            if choice.token in ends and not params.ignore_eos:
                answer.finish = "stop"
                break
        return answer
