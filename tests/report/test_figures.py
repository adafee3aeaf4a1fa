"""Figures: the right numbers in pages that need no network."""

import re
from dataclasses import replace

import pytest

from meshwright.core.errors import InputError
from meshwright.core.measures import MemoryBreakdown, Traffic
from meshwright.report.figures import (
    experts_figures,
    loss_figure,
    memory_figure,
    traffic_figure,
    write_figure,
    write_loss_figure,
)
from meshwright.train.metrics import MetricsWriter, StepMetrics


def rows(count):
    return [
        StepMetrics(step, 5.0 / (step + 1), 0.5, 1e-3, 64, 1000.0, 0.064, 4.0 if step == 2 else None)
        for step in range(count)
    ]


def test_loss_figure_has_both_curves():
    training, evaluation = loss_figure(rows(4)).data
    assert list(training.x) == [1, 2, 3, 4]
    assert list(training.y) == [5.0 / n for n in (1, 2, 3, 4)]
    assert (list(evaluation.x), list(evaluation.y)) == ([3], [4.0])
    assert len(loss_figure(rows(2)).data) == 1


def test_loads_of_experts_by_step_and_by_expert():
    loads = [{"1": [4, 0], "2": [2, 2]}, {"1": [3, 1], "2": [1, 3]}]
    lines, heat = experts_figures([replace(row, expert_loads=of) for row, of in zip(rows(2), loads, strict=True)])
    assert [(line.name, list(line.y)) for line in lines.data] == [("layer 1", [2.0, 1.5]), ("layer 2", [1.0, 1.5])]
    assert [list(z) for z in heat.data[0].z] == [[1.5, 0.5], [0.5, 1.5]]
    assert experts_figures(rows(2)) == []


def test_loss_page_is_written_from_the_run_folder_and_self_contained(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for row in rows(4):
            writer.write(row)
    path = write_loss_figure(tmp_path)
    assert path == tmp_path / "loss.html"
    page = path.read_text(encoding="utf-8")
    assert "5.000 → 1.250 in 4 steps" in page or "5.000 \\u2192 1.250 in 4 steps" in page
    assert not re.search(r'<(script|link)[^>]+(src|href)="http', page)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["loss.html", "metrics.jsonl"]


def test_a_run_without_steps_is_told(tmp_path):
    MetricsWriter(tmp_path, tensorboard=False).close()
    with pytest.raises(InputError, match="nothing to draw"):
        write_loss_figure(tmp_path)


def test_memory_bars_add_up():
    memory = MemoryBreakdown(*(n * 10**9 for n in range(1, 7)))
    figure = memory_figure({"forecast": memory, "measured": memory}, limit_bytes=20_000_000_000)
    names = ["parameters", "gradients", "optimizer", "activations", "buffers", "working"]
    assert [bar.name for bar in figure.data] == names
    assert sum(bar.x[0] for bar in figure.data) == pytest.approx(memory.total_bytes / 1e9)
    assert figure.layout.barmode == "stack"
    assert figure.layout.shapes[0].x0 == 20


def test_traffic_bars_stand_beside_each_other(tmp_path):
    forecast, measured = Traffic(), Traffic()
    forecast.add("send", "pp", "forward", 2_000_000, 2)
    measured.add("send", "pp", "forward", 3_000_000, 2)
    measured.add("all_reduce", "dp", "gradients", 4_000_000, 2)
    figure = traffic_figure({"forecast": forecast, "measured": measured})
    first, second = figure.data
    assert list(first.y) == list(second.y) == ["forward: send over pp", "gradients: all_reduce over dp"]
    assert list(first.x) == [2, 0]
    assert list(second.x) == [3, 4]
    assert write_figure(figure, tmp_path / "new" / "traffic.html").stat().st_size > 10_000
