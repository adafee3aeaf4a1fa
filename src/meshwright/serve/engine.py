"""Engine: many prompts at once through one model.

    engine = Engine(model, plan, tokenizer=tokenizer)
    answers = engine.generate(["Once upon"], SamplingParams(max_tokens=20))

    submit ─▶ scheduler ─▶ batch ─▶ every rank's runner ─▶ logits on rank 0 ─▶ choice ─▶ text, stop strings ─▶ events

Rank 0 decides; the other ranks follow it, step by step. An engine is one replica of the model, with a cache and a
scheduler of its own; where the plan has dp of them, rank 0 has an engine for each (`replicas`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from time import monotonic, perf_counter
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from meshwright.comm.mesh import Mesh, start
from meshwright.core.axes import DP
from meshwright.core.errors import InputError
from meshwright.core.model import ModelSpec
from meshwright.core.placement import Placement
from meshwright.core.plan import Plan
from meshwright.core.strategy import Strategy
from meshwright.cost.kv_cache import largest_kv_token_bytes
from meshwright.parallel.states import DTYPES
from meshwright.serve.batch import make_batch, wants_all
from meshwright.serve.blocks import BlockManager
from meshwright.serve.options import ServeOptions
from meshwright.serve.ranks import Distant, InStep, Ranks, Together, follow, num_sharing
from meshwright.serve.request import (
    MAX_SEED,
    Finish,
    SamplingParams,
    Sequence,
    check_request,
    context_of,
    sequences,
)
from meshwright.serve.runner import Runner, Weights
from meshwright.serve.sampler import Choice, Logprobs, choose, logprobs_of
from meshwright.serve.scheduler import Chunk, Scheduler
from meshwright.serve.servable import check_servable
from meshwright.serve.swap import Pace
from meshwright.serve.text import Detokenizer, Spelling, StopFinder, detokenizers, encode


@dataclass(slots=True, eq=False)
class Event:
    """What a step brought one sequence."""

    sequence: Sequence
    text: str = ""
    """New text; never half a character, and nothing of a stop string."""
    token: int | None = None
    logprobs: Logprobs | None = None
    """Of the token."""
    prompt_logprobs: tuple[Logprobs, ...] = ()
    """Of tokens of the prompt, from its second on, as far as this step came."""
    finish: Finish | None = None


@dataclass(slots=True)
class Answer:
    """One answer, whole."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """One more event of its sequence."""
        self.text += event.text
        if event.token is not None:
            self.tokens.append(event.token)
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)
        self.prompt_logprobs += event.prompt_logprobs
        self.finish = event.finish or self.finish


@dataclass(slots=True)
class _Output:
    """What a sequence's tokens become."""

    detokenizer: Detokenizer | None
    stops: StopFinder


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A step that the ranks were told."""

    events: list[Event]
    """Of before it."""
    chunks: list[Chunk]
    has_moves: bool
    began_s: float


class Engine:
    """A model, served. Every rank builds one; rank 0 uses it, the others call :meth:`follow`.

    Args:
        model: a plain model: with weights, which are shared with it, or on the meta device with `weights`; that is
            taken over.
        plan: how it is divided; None: not at all, in the dtype of its weights.
        options: sizes of cache, steps and queue.
        tokenizer: for prompts and answers as text.
        end_tokens: tokens that end an answer.
        mesh: of the run that stands; None: this process alone, or what torchrun describes.
        weights: where each rank reads its boxes.
        special_tokens: whether a prompt as text gets the tokenizer's own beginning.
        clock: seconds, for deadlines and order of arrival.
        ranks: who computes the steps: of a run of several, all of them together, or this rank alone.

    Raises:
        UnsupportedError: a plan, or a model, that cannot be served.
        InputError: a cache that holds no token.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | Strategy | None = None,
        options: ServeOptions | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        end_tokens: Ordered[int] = (),
        special_tokens: bool = True,
        mesh: Mesh | None = None,
        weights: Weights | None = None,
        clock: Callable[[], float] = monotonic,
        ranks: Callable[[Runner], Ranks] = Together,
    ) -> None:
        spec: Any = model.spec
        self.spec: ModelSpec = spec
        self.options = options or ServeOptions()
        self.tokenizer = tokenizer
        self.end_tokens = frozenset(end_tokens)
        self._detokenizer = None if tokenizer is None else detokenizers(tokenizer)
        self._special_tokens = special_tokens
        strategy = plan.strategy if isinstance(plan, Plan) else plan or Strategy(precision=_precision(model))
        check_servable(self.spec, strategy)
        num_blocks = self.options.num_blocks or self._affordable(strategy, "cache_bytes")
        self._clock, self._num_blocks = clock, num_blocks
        swaps = self.options.preempt != "recompute"
        num_host_blocks = self._affordable(strategy, "swap_bytes") if swaps else 0
        self.mesh = mesh or _mesh(strategy)
        block_size = self.options.block_size
        model, weights = (model, weights) if weights else _shared(model)
        self.runner = Runner(model, self.spec, strategy, self.mesh, weights, num_blocks, block_size, num_host_blocks)
        self.context = context_of(self.spec)
        """Tokens of prompt and answer together, by the model."""
        self._begin_with(ranks(self.runner))
        self.replicas: tuple[Engine, ...] = (self,)
        """On rank 0 one for each replica, this one first: their steps run beside each other."""
        self.num_sharing = num_sharing(self.mesh)
        """So many neighbours among them share experts: one thread is to step them, all begun before any is ended."""
        if self.mesh[DP].size > 1 and self.mesh.rank == 0 and ranks is Together:
            self._add_replicas()

    def _begin_with(self, ranks: Ranks) -> None:
        """Cache, queue and answers of one replica, all empty."""
        options, host, num_host_blocks = self.options, None, self.runner.num_host_blocks
        if num_host_blocks:
            host = BlockManager(num_host_blocks, options.block_size, share=False)
        self.ranks = ranks
        self._pace = self._timed() if options.preempt == "auto" else None
        pays = self._pace.swap_pays if self._pace else lambda _: True
        blocks = BlockManager(self._num_blocks, options.block_size, options.prefix_cache)
        self.scheduler = Scheduler(options, blocks, self._clock, host, pays)
        self._outputs: dict[Sequence, _Output] = {}
        self._next_id = 0
        self._under_way: _UnderWay | None = None
        self.last_step_tokens = 0
        """Tokens that the last step computed."""

    def _add_replicas(self) -> None:
        """Those whose steps other ranks compute."""
        others = [copy(self) for _ in range(1, self.mesh[DP].size)]
        self.replicas = (self, *others)
        for index, other in enumerate(others, start=1):
            other._begin_with(Distant(self.runner, index))
            other.replicas = (other,)
        if self.num_sharing > 1:
            groups: list[list[InStep]] = [[] for _ in range(0, len(self.replicas), self.num_sharing)]
            for index, each in enumerate(self.replicas):
                each.ranks = InStep(each.ranks, groups[index // self.num_sharing])

    @property
    def max_length(self) -> int:
        """Tokens of prompt and answer together: what the model, and the whole cache, can hold."""
        return min(self.context, self.scheduler.longest)

    def _affordable(self, strategy: Strategy, option: str) -> int:
        """Blocks that so many bytes hold, on the rank with the most layers."""
        block_bytes = self.options.block_size * largest_kv_token_bytes(self.spec, strategy)
        have: int = getattr(self.options, option)
        if have < block_bytes:
            raise InputError(
                f"{option}={have}: one block of {self.options.block_size} tokens takes {block_bytes} bytes; give it "
                "more, or make blocks smaller"
            )
        return have // block_bytes

    def _timed(self) -> Pace:
        """What tells when swapping pays, by this rank's own copies and steps."""
        assert self.runner.host is not None
        return Pace(self.runner.host.seconds_per_block(), self.options.block_size)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text. Raises InputError where it is none, or there is no tokenizer.

        Args:
            special: False: without the tokenizer's own beginning, where the text has it already.
        """
        return encode(self.tokenizer, text, special and self._special_tokens)

    def decode(self, tokens: Ordered[int], special: bool = False) -> str:
        """Text of token ids, with special ones or without. Raises InputError where there is none."""
        if self.tokenizer is None:
            raise InputError("this model has no tokenizer: token ids are all there is")
        if (wrong := next((t for t in tokens if not 0 <= t < self.spec.vocab_size), None)) is not None:
            raise InputError(f"token {wrong} is none of the model's: ids go from 0 to {self.spec.vocab_size - 1}")
        return str(self.tokenizer.decode_batch([list(tokens)], skip_special_tokens=not special)[0])

    @cached_property
    def spelling(self) -> Spelling:
        """Of single tokens. Raises InputError where there is no tokenizer."""
        if self.tokenizer is None:
            raise InputError("this model has no tokenizer: token ids are all there is")
        return Spelling(self.tokenizer)

    def check(self, prompt: Ordered[int], params: SamplingParams) -> None:
        """Raises InputError where a request could never be answered."""
        why = "the model's context" if self.max_length == self.context else "the whole key/value cache"
        check_request(prompt, params, self.spec.vocab_size, self.max_length, why)

    def submit(
        self,
        prompt: str | Ordered[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        matchers: Callable[[], object] | None = None,
    ) -> list[Sequence]:
        """Queue a request; its `n` sequences.

        Args:
            prompt: text, or token ids.
            params: how to answer.
            priority: smaller goes first, as if it had come `priority_s` seconds earlier for each step.
            timeout_s: after so long it ends, with what it has.
            matchers: makes what follows the grammar, one for each sequence.

        Raises:
            InputError: a request that could never be answered, or a full queue.
        """
        params = params or SamplingParams()
        tokens = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self.check(tokens, params)
        self.scheduler.check_room(params.n)
        return self.enqueue(tokens, params, priority=priority, timeout_s=timeout_s, matchers=matchers)

    def enqueue(
        self,
        tokens: Ordered[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        matchers: Callable[[], object] | None = None,
    ) -> list[Sequence]:
        """As :meth:`submit`, for a request that was checked, whatever the queue's length."""
        now = self.scheduler.clock()
        order = now + priority * self.options.priority_s
        seed = secrets.randbelow(MAX_SEED) if params.seed is None else params.seed
        deadline = None if timeout_s is None else now + timeout_s
        made = sequences(self._next_id, tokens, params, seed, self.max_length, order, deadline)
        self._next_id += params.n
        for sequence in made:
            sequence.arrived_s = now
            sequence.matcher = matchers() if matchers else None
            self._outputs[sequence] = _Output(self._detokenizer and self._detokenizer(), StopFinder(params.stop))
            self.scheduler.add(sequence)
        return made

    def cancel(self, sequence: Sequence) -> None:
        """Nobody wants this answer any more: its blocks are given up at once."""
        if sequence.finish is None:
            self._end(sequence, "abort")

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle

    def step(self) -> list[Event]:
        """Compute one step of this replica; what it brought. Empty where nothing is to be done.

        Raises:
            RankError: a rank is lost; the engine is of no use any more.
        """
        self.begin_step()
        return self.end_step()

    def begin_step(self) -> None:
        """Choose what the next step computes, and tell the ranks of this replica. Raises RankError."""
        assert self._under_way is None
        events = [Event(s, self._end(s, "deadline"), finish="deadline") for s in list(self.scheduler.late())]
        chunks = self.scheduler.step()
        moves = self.scheduler.take_moves()
        self.last_step_tokens = sum(chunk.count for chunk in chunks)
        self._under_way = _UnderWay(events, chunks, bool(moves), perf_counter())
        if chunks or moves:
            self.ranks.start(make_batch(chunks, self.options.block_size, moves))

    def end_step(self) -> list[Event]:
        """What the step that was begun brings. Raises RankError."""
        step, self._under_way = self._under_way, None
        assert step is not None
        if not step.chunks and not step.has_moves:
            return step.events
        logits = self.ranks.wait()
        if self._pace is not None and not step.has_moves:
            num_prompt = sum(chunk.count for chunk in step.chunks if chunk.count > 1)
            self._pace.saw(num_prompt, perf_counter() - step.began_s)
        self.scheduler.computed(step.chunks)
        return step.events if logits is None else step.events + self._choose(step.chunks, logits)

    def _choose(self, chunks: Ordered[Chunk], logits: torch.Tensor) -> list[Event]:
        rows: list[int] = []
        prompt_rows: dict[Sequence, tuple[Logprobs, ...]] = {}
        chosen: list[Sequence] = []
        at = 0
        for chunk in chunks:
            wants_prompt = wants_all(chunk)
            wanted = chunk.count if wants_prompt else int(chunk.is_last)
            if wants_prompt:
                prompt_rows[chunk.sequence] = _of_prompt(chunk, logits[at : at + wanted])
            at += wanted
            if chunk.is_last:
                rows.append(at - 1)
                chosen.append(chunk.sequence)
        answering = [at for at, s in enumerate(chosen) if s.num_tokens < s.max_length]
        picked = [chosen[at] for at in answering]
        own = [rows[at] for at in answering]
        if own != list(range(len(logits))):
            logits = logits[own]
        choices = dict(zip(picked, choose(logits, picked, self.end_tokens)))
        events = [self._take(s, choices.get(s), prompt_rows.pop(s, ())) for s in chosen]
        return events + [Event(s, prompt_logprobs=found) for s, found in prompt_rows.items()]

    def _take(self, sequence: Sequence, choice: Choice | None, of_prompt: tuple[Logprobs, ...]) -> Event:
        """A token was chosen: does it end the answer, and what text is certain now?"""
        if choice is None:  # no token was asked for
            return Event(sequence, self._end(sequence, "length"), prompt_logprobs=of_prompt, finish="length")
        if choice.token is None:
            return Event(sequence, self._end(sequence, "error"), finish="error")
        token = choice.token
        if sequence.matcher is not None:
            sequence.matcher.accept(token)
            if sequence.matcher.fault is not None:
                return Event(sequence, self._end(sequence, "error"), finish="error")
        self.scheduler.append(sequence, token)
        finish: Finish | None = "stop" if self._is_end(sequence, token) else None
        text = self._end(sequence, "stop") if finish else ""
        if not finish:
            text, finish = self._text(sequence, token)
        return Event(sequence, text, token, choice.logprobs, of_prompt, finish)

    def _text(self, sequence: Sequence, token: int) -> tuple[str, Finish | None]:
        """New text, and why the answer ends with this token, if it does."""
        output = self._outputs[sequence]
        text = output.stops.push(output.detokenizer.push(token)) if output.detokenizer else ""
        if output.stops.found is not None:
            self._end(sequence, "stop")
            return text, "stop"
        is_done = sequence.matcher is not None and sequence.matcher.is_done
        if is_done or sequence.num_tokens >= sequence.max_length:
            finish: Finish = "stop" if is_done else "length"
            return text + self._end(sequence, finish), finish
        return text, None

    def _is_end(self, sequence: Sequence, token: int) -> bool:
        params = sequence.params
        if len(sequence.output) < params.min_tokens:
            return False
        return token in params.stop_token_ids or (token in self.end_tokens and not params.ignore_eos)

    def _end(self, sequence: Sequence, why: Finish) -> str:
        """End a sequence; the text that was held back."""
        output = self._outputs.pop(sequence)
        self.scheduler.finish(sequence, why)
        if output.detokenizer is None or output.stops.found is not None:
            return ""
        last = output.stops.push(output.detokenizer.finish())
        return last if output.stops.found is not None else last + output.stops.finish()

    def generate(
        self, prompts: Ordered[str | Ordered[int]], params: SamplingParams | Ordered[SamplingParams] | None = None
    ) -> list[list[Answer]]:
        """Answer all prompts; of each its `n` answers. All ranks call it; those that follow get an empty list.

        Args:
            prompts: texts or token ids.
            params: for all, or one for each.

        Raises:
            InputError: a prompt that cannot be answered; then none is.
        """
        if self.mesh.rank:
            self.follow()
            return []
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Ordered) else list(params)
        if len(each) != len(prompts):
            raise InputError(f"{len(prompts)} prompts and {len(each)} params: give one for each, or one for all")
        ids = [self.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        for prompt, own in zip(ids, each, strict=True):
            self.check(prompt, own)
        answers: dict[Sequence, Answer] = {}
        waiting = iter(zip(ids, each, strict=True))
        grouped: list[list[Answer]] = []
        has_more = True
        while has_more or not all(engine.is_idle for engine in self.replicas):
            has_more = has_more and self._refill(waiting, answers, grouped)
            for engine in self.replicas:
                engine.begin_step()
            for event in (event for engine in self.replicas for event in engine.end_step()):
                answers[event.sequence].add(event)
        for engine in self.replicas:
            engine.stop()
        return grouped

    def _refill(
        self,
        waiting: Iterator[tuple[list[int], SamplingParams]],
        answers: dict[Sequence, Answer],
        grouped: list[list[Answer]],
    ) -> bool:
        """Submit prompts while queues are short, each to the replica with the least to compute; whether there may be
        more."""
        while True:
            engine = min(self.replicas, key=lambda engine: engine.scheduler.num_left)
            if len(engine.scheduler.waiting) > self.options.max_waiting // 2:
                return True
            request = next(waiting, None)
            if request is None:
                return False
            made = engine.submit(*request)
            grouped.append([answers.setdefault(sequence, Answer(sequence.prompt)) for sequence in made])

    # --- the other ranks -----------------------------------------------------------------------------------

    def stop(self) -> None:
        """End :meth:`follow` on the other ranks of this replica."""
        if self.mesh.rank == 0:
            self.ranks.stop()

    def beat(self) -> None:
        """A sign of life for the ranks that follow, which give up when nothing comes for too long.

        Raises RankError where one of them is lost.
        """
        if self.mesh.rank == 0:
            self.ranks.beat()

    def follow(self) -> None:
        """On a rank other than 0: compute what rank 0 tells, until it stops. Raises RankError where it is lost."""
        follow(self.runner)


def _of_prompt(chunk: Chunk, logits: torch.Tensor) -> tuple[Logprobs, ...]:
    """Of the tokens that follow the chunk's in the prompt, but for those that were told before a preemption."""
    sequence, end = chunk.sequence, chunk.start + chunk.count
    first = max(chunk.start, sequence.num_told)
    sequence.num_told = max(end, first)
    num_top, following = sequence.params.logprobs or 0, sequence.prompt[first + 1 : end + 1]
    return tuple(
        logprobs_of(row, token, num_top) for row, token in zip(logits[first - chunk.start :], following, strict=False)
    )


def _mesh(strategy: Strategy) -> Mesh:
    start("cuda" if torch.cuda.is_available() else "cpu")
    return Mesh.create(strategy.sizes, ep=strategy.ep)


def _precision(model: nn.Module) -> str:
    """The recipe whose parameters have the dtype of the model's."""
    dtype = next(model.parameters()).dtype
    return next(name for name in ("fp32", "bf16", "fp16", "fp64") if DTYPES[name] == dtype)


def _shared(model: nn.Module) -> tuple[nn.Module, Weights]:
    """A copy of the modules around the same weights, and where to read these: the caller's model stays as it is."""
    weights = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    weights |= dict(model.named_buffers())
    if any(weight.is_meta for weight in weights.values()):
        raise InputError("the model has no weights: load them first, or give `weights`")

    def read(held: tuple[Placement, ...]) -> Iterator[torch.Tensor]:
        return (weights[placement.name][placement.box.slices] for placement in held)

    return deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}), read
