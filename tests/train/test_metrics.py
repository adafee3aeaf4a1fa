"""Metrics: on disk at once, safe to resume, read by TensorBoard; progress in both forms."""

import io
import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from meshwright.core.errors import InputError
from meshwright.train.metrics import MetricsWriter, StepMetrics, read_metrics
from meshwright.train.progress import Progress


def row(step, loss=2.5, eval_loss=None):
    return StepMetrics(step, loss, 0.81, 3e-4, 512, 12345.6, 0.0415, eval_loss)


def write(run_dir, steps, start_step=0):
    with MetricsWriter(run_dir, start_step, tensorboard=False) as writer:
        for step in steps:
            writer.write(row(step, loss=start_step + step / 10))


def test_rows_are_on_disk_at_once_and_read_back(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(row(0, eval_loss=2.25))
        writer.write(row(1))
        assert read_metrics(tmp_path) == [row(0, eval_loss=2.25), row(1)]
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first["eval_loss"] == 2.25
    assert "eval_loss" not in second
    assert set(second) == {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_time_s"}


def test_loads_of_experts_are_read_back_and_on_tensorboard(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        found = replace(
            row(0), expert_imbalance=1.5, expert_loads={"1": [3, 1], "2": [2, 2]}, expert_taken={"1": [2, 1]}
        )
        writer.write(found)
    assert read_metrics(tmp_path) == [found]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Scalars("experts/layer_1/expert_0")[0].value == 1.5
    assert events.Scalars("experts/layer_2/expert_1")[0].value == 1.0


def test_resume_drops_the_steps_that_are_repeated(tmp_path):
    write(tmp_path, range(7))
    write(tmp_path, range(4, 6), start_step=4)
    rows = read_metrics(tmp_path)
    assert [r.step for r in rows] == [0, 1, 2, 3, 4, 5]
    assert rows[3].loss < 1 < 4 <= rows[4].loss


def test_a_new_run_starts_empty(tmp_path):
    write(tmp_path, range(3))
    write(tmp_path, [0])
    assert len(read_metrics(tmp_path)) == 1


def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path):
    write(tmp_path, range(3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert len(read_metrics(tmp_path)) == 3
    write(tmp_path, [3], start_step=3)
    assert [r.step for r in read_metrics(tmp_path)] == [0, 1, 2, 3]


def test_a_diverged_loss_is_valid_json(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(row(0, loss=math.nan))
        writer.write(row(1, loss=math.inf))

    def refuse(name):
        raise AssertionError(name)

    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    rows = read_metrics(tmp_path)
    assert math.isnan(rows[0].loss)
    assert rows[1].loss == math.inf


def test_bad_metrics_name_the_line(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_metrics(tmp_path)
    write(tmp_path, [0])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"steps": 3}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl:2: not a row"):
        read_metrics(tmp_path)


def test_tensorboard_reads_the_events_across_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start in (0, 2):
        with MetricsWriter(tmp_path, start) as writer:
            for step in range(start, start + 4):
                writer.write(row(step, loss=start + step, eval_loss=1.0 if step == 1 else None))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(0, 0), (1, 1), (2, 4), (3, 5), (4, 6), (5, 7)]
    assert [e.step for e in events.Scalars("train/eval_loss")] == [1]


def make_progress(terminal, width=120, **options):
    out = io.StringIO()
    times = iter(range(0, 1000, 2))
    console = Console(file=out, force_terminal=terminal, width=width)
    return out, Progress(25, console=console, clock=lambda: next(times), **options)


def test_plain_lines_where_there_is_no_terminal():
    out, progress = make_progress(False, every=10)
    with progress:
        for step in range(25):
            progress.update(row(step, eval_loss=2.0 if step == 9 else None))
    lines = out.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 10/25", "step 20/25", "step 25/25"]
    numbers = "12,346 tokens/s  grad norm 0.81  lr 3.0e-04"
    assert lines[0] == f"step 10/25  loss 2.5000  eval 2.0000  left 30.0 s  {numbers}"
    assert lines[2] == f"step 25/25  loss 2.5000  eval 2.0000  left 0 s  {numbers}"
    assert "\x1b" not in out.getvalue()


def test_steps_of_fp16_are_read_back_and_shown(tmp_path):
    """The scale of the last step, and how many were skipped so far."""
    rows = [replace(row(step), skipped=step == 1, loss_scale=65536.0 / (1 + (step > 1))) for step in range(3)]
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for each in rows:
            writer.write(each)
    assert read_metrics(tmp_path) == rows
    assert [each.skipped for each in read_metrics(tmp_path)] == [False, True, False]
    out, progress = make_progress(False, every=3)
    with progress:
        for each in rows:
            progress.update(each)
    assert out.getvalue().endswith("lr 3.0e-04  loss scale 32,768, 1 skipped\n")


def test_time_left_counts_the_steps_of_this_process():
    out, progress = make_progress(False, every=1, start_step=20)
    with progress:
        progress.update(row(20))
    assert "  left 8.00 s  " in out.getvalue()


@pytest.mark.parametrize("width", [60, 140])
def test_a_terminal_gets_one_live_line(width):
    out, progress = make_progress(True, width)
    with progress:
        for step in range(25):
            progress.update(row(step))
    last = out.getvalue().replace("\x1b[?25h", "").rstrip().split("\r")[-1].splitlines()[-1]
    for text in ("step 25/25", "loss 2.5000", "left 0 s", "tokens/s"):
        assert text in last
    assert ("lr 3.0e-04" in last) == (width == 140)
