"""Before any rank starts: what can be refused is refused here, and the run's folder is made.

new      can it be run? ─▶ another run there? ─▶ tokenise the text ─▶ write options, then plan
resumed  can it be run? ─▶ the same run?      ─▶ (the ranks load its checkpoint) ─▶ write options, then plan

A mistake leaves nothing behind and changes nothing; `plan.toml` is written last: where it stands, the rest is whole.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.checkpoint import latest, peek
from meshwright.core.errors import InputError, MeshwrightWarning, UnsupportedError
from meshwright.core.hf_config import to_hf_config
from meshwright.core.model import ModelSpec
from meshwright.core.plan import Plan
from meshwright.models.build import build
from meshwright.models.hf import HFCheckpoint
from meshwright.parallel.offload.folder import check_folder
from meshwright.run.engine import check_options
from meshwright.run.folder import RunFolder
from meshwright.run.options import TrainOptions
from meshwright.schedule.build import first_steady
from meshwright.train.data import check_enough_tokens, check_same_samples
from meshwright.train.prepare import load_prepared, prepare
from meshwright.train.tokenizer import load_tokenizer


def set_up(plan: Plan, options: TrainOptions, run: RunFolder, *, resume: bool) -> None:
    """Make `run` ready for the ranks of `plan`. One process calls it, before the ranks do anything.

    Raises:
        UnsupportedError: the plan can be made, but not be run.
        InputError: options that contradict each other, or the plan's schedule, a text that is too short, a
            tokenizer that is too large; nowhere to offload to; a folder that holds another run, or, with `resume`,
            none.
        CheckpointError: nothing to start from in `options.pretrained`.
    """
    check_runnable(plan)
    offload = plan.strategy.offload
    if "disk" in offload.tiers:
        check_folder(Path(offload.path or ""))
    options.learning_rate_at(0)
    if options.loss_scale is not None and not plan.strategy.recipe.scales_loss:
        raise InputError(
            f"loss_scale with precision={plan.strategy.precision}, which needs none: only fp16 loses gradients below "
            "6e-8; leave it out, or plan with --precision fp16"
        )
    if plan.strategy.pipeline_schedule.is_asynchronous:
        _check_asynchronous(plan, options)
    if resume:
        _check_same_run(plan, options, run)
        return
    run.refuse_existing()
    for warning in filter(None, (export_warning(plan.model), plan.model.length_warning(plan.job.seq_length))):
        warnings.warn(warning, MeshwrightWarning, stacklevel=2)
    if options.pretrained:
        HFCheckpoint(options.pretrained, plan.model).close()
    with _nothing_left_on_failure(run):
        _prepare_data(plan, options, run)
        run.write(plan, options)


def go_on(plan: Plan, options: TrainOptions, run: RunFolder) -> None:
    """Of a resumed run, once its checkpoint is loaded: from here on it is run by this plan and these options."""
    shutil.rmtree(run.measured, ignore_errors=True)  # of another plan, perhaps with more ranks
    run.write(plan, options)


def export_warning(model: ModelSpec) -> str | None:
    """One line where a model can be trained, but no Hugging Face configuration can say what it is; else None."""
    try:
        to_hf_config(model)
    except UnsupportedError as error:
        return f"{error}; it can be trained, but not exported"
    return None


def check_runnable(plan: Plan) -> None:
    """Raises UnsupportedError where a plan can be made but not yet carried out."""
    build(plan.model)
    plan.model.check_length(plan.job.seq_length)
    plan.strategy.recipe.check_runnable()


def _check_asynchronous(plan: Plan, options: TrainOptions) -> None:
    """An evaluation or a checkpoint ends what is under way. Refuses those that come before the pipeline is full."""
    check_options(plan, options.optimizer(plan.job.optimizer, clips=False))
    needed = first_steady(plan.strategy.pipeline) + 1
    for name in ("steps", "save_every", "eval_every"):
        if (every := getattr(options, name)) < needed:
            raise InputError(
                f"{name}={every} with schedule={plan.strategy.schedule}: only after {needed} steps without a stop has "
                f"one had a full pipeline, and can be measured; take {needed} or more"
            )


def _check_same_run(plan: Plan, options: TrainOptions, run: RunFolder) -> None:
    """Any layout may go on with a run; another model, job or text is another run."""
    before = run.plan()
    names = f" (`{before.model.name}`, now `{plan.model.name}`)"
    lengths = f": {before.job.seq_length}, now {plan.job.seq_length}"
    optimizers = f": {before.job.optimizer}, now {plan.job.optimizer}"
    for what, is_same, numbers in (
        ("model", before.model == plan.model, names),
        ("sequence length", before.job.seq_length == plan.job.seq_length, lengths),
        ("optimizer", before.job.optimizer == plan.job.optimizer, optimizers),
    ):
        if not is_same:
            raise InputError(f"{run.path}: was trained with another {what}{numbers}; use another folder, or its plan")
    begun = latest(run.checkpoints) is not None
    if begun and options.pretrained != (first := run.options().pretrained):
        raise InputError(
            f"{run.path}: goes on with the weights that it has, so `pretrained` must stay what it was "
            f"({first or 'none'}); to start from {options.pretrained}, use another folder"
        )
    if options.text_options() != run.options().text_options():
        _prepare_data(plan, options, run)  # refuses other text, and finds out whether it is
    data = load_prepared(run.data)
    num_tokens = data.num_tokens - data.num_eval_tokens
    check_enough_tokens(num_tokens, plan.job.seq_length, plan.job.global_batch_size)
    if begun:
        check_same_samples(peek(run.checkpoints)["data"], num_tokens, plan.job.seq_length, options.seed)


def _prepare_data(plan: Plan, options: TrainOptions, run: RunFolder) -> None:
    """Tokenise the run's text, once."""
    tokenizer = options.tokenizer_path()
    if tokenizer is not None:
        num_entries, rows = load_tokenizer(tokenizer)[0].get_vocab_size(), plan.model.vocab_size
        if num_entries > rows:
            raise InputError(
                f"{tokenizer}: the tokenizer has {num_entries:,} entries, model `{plan.model.name}` only {rows:,}; "
                "use the model's own tokenizer"
            )
    prepare(
        options.source(),
        run.data,
        vocab_size=None if tokenizer else plan.model.vocab_size,
        tokenizer=tokenizer,
        seq_length=plan.job.seq_length,
        global_batch_size=plan.job.global_batch_size,
    )


@contextmanager
def _nothing_left_on_failure(run: RunFolder) -> Iterator[None]:
    """Folders and data that weren't there before are gone again where the block fails."""
    new_folders = [folder for folder in (run.data, run.path, *run.path.parents) if not folder.exists()]
    try:
        yield
    except BaseException:
        if run.data in new_folders:
            shutil.rmtree(run.data, ignore_errors=True)
        for file in (run.plan_path, run.options_path):
            _remove(file)
        for folder in new_folders[1:]:
            _remove_if_empty(folder)
        raise


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError:  # the folder itself may be what is wrong
        return


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return
