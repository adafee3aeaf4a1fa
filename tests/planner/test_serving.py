"""Plans for serving: what is chosen, what is refused and what would help, and the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.core.errors import InputError, MeshwrightError, RuleError
from meshwright.core.plan import Plan
from meshwright.core.serving import Layout, Requests, ServingPlan, broken_rules, is_serving
from meshwright.core.sources import load_cluster, load_model
from meshwright.cost.steady import CACHE
from meshwright.planner.explain_serving import decode_curve, turning_point
from meshwright.planner.fix_serving import parse_layout
from meshwright.planner.serving import plan_serving, priced
from meshwright.planner.serving_search import ServingForecast, forecast, layouts
from tests.planner.tool_flags import VLLM, parse, words_of

LLAMA = load_model("llama-3-8b")
REQUESTS = Requests(prompt_tokens=2048, output_tokens=256, rate_per_s=20)
SERVE = ["plan", "llama-3-8b", "8xh100", "--serve", "--rate", "20"]


def test_the_winner_is_the_best_of_all_layouts():
    """Against every legal layout with every size of step, none left out."""
    cluster = load_cluster("4xh100")
    result = plan_serving(LLAMA, cluster, REQUESTS)
    best = 0.0
    for layout in layouts(LLAMA, cluster, {}):
        if broken_rules(layout, LLAMA, cluster, REQUESTS):
            continue
        for tokens in (256, 1024, 4096):
            sizes = {"step_tokens": tokens, "max_running": 200, "num_blocks": 200 * 144}
            found = forecast(LLAMA, cluster, REQUESTS, layout.model_copy(update=sizes))
            if isinstance(found, ServingForecast):
                best = max(best, found.tokens_per_device_s)
    assert result.forecast.tokens_per_device_s >= 0.98 * best > 0
    assert [f.tokens_per_device_s for f in result.ranked] == sorted(
        (f.tokens_per_device_s for f in result.ranked), reverse=True
    )


def test_what_is_offered_fits_sustains_the_rate_and_keeps_the_limits():
    asked = REQUESTS.model_copy(update={"max_ttft_s": 0.2, "max_tpot_s": 0.01})
    result = plan_serving(LLAMA, load_cluster("8xh100"), asked)
    for each in result.ranked:
        assert each.rank_bytes <= 0.92 * 85_899_345_920
        assert each.utilisation <= 1
        assert each.now.ttft_s <= 0.2
        assert each.now.tpot_s <= 0.01
        assert each.most.load.ttft_s <= 0.2
        assert each.most.load.tpot_s <= 0.01
        assert each.now.num_running <= each.layout.max_running
        assert each.needed_replicas <= each.layout.replicas


def test_a_limit_of_latency_takes_more_ranks_of_tp():
    """Nobody reads 16 GB of weights in 4 ms from one device of 3.35 TB/s; four together do."""
    asked = REQUESTS.model_copy(update={"max_tpot_s": 0.004})
    free, kept = (plan_serving(LLAMA, load_cluster("8xh100"), each).plan.layout for each in (REQUESTS, asked))
    assert free.tp == 1 < kept.tp


def test_decoding_turns_where_reductions_cost_more_than_they_save():
    cluster, layout = load_cluster("2x8xh100"), Layout()
    curve = decode_curve(load_model("llama-3-70b"), cluster, REQUESTS, layout, 16)
    assert [point.tp for point in curve] == [1, 2, 4, 8, 16]
    assert turning_point(curve).tp == 8
    assert all(point.many_s > point.one_s for point in curve)
    cluster = load_cluster("8xa100")
    small = decode_curve(load_model("gpt2"), cluster, REQUESTS.model_copy(update={"prompt_tokens": 64}), layout, 1)
    assert turning_point(small).tp == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["llama-3-70b", "1xh100"], ("does not fit", "142 GB per rank of 79.0 GB", "2 devices instead of 1")),
        (["llama-3-8b", "8xh100", "--rate", "100000"], ("at most", "nearest: --rate", "devices")),
        (["llama-3-8b", "8xh100", "--max-ttft", "0.001"], ("no layout keeps the limits", "nearest: --max-ttft 0.02")),
        (["llama-3-8b", "8xh100", "--prompt", "9000"], ("holds 8192", "nearest: --prompt 7936")),
        (["gpt2", "8xh100", "--prompt", "1", "--output", "5000"], ("holds 1024", "nearest: --output 1023")),
        (["llama-3-8b", "8xh100", "--fix", "tp=3"], ("tp=3 does not divide the heads 32", "tp-heads")),
        (["llama-3-8b", "8xh100", "--fix", "tp=16"], ("tp=16", "8xh100")),
        (["llama-3-8b", "8xh100", "--fix", "replicas=9"], ("9 ranks", "nearest: replicas=8")),
        (["llama-3-8b", "8xh100", "--fix", "ep=2"], ("expert",)),
        (["llama-3-8b", "8xh100", "--fix", "zero=1"], ("not a field of a layout", "fields: replicas")),
        (["llama-3-8b", "8xh100", "--fix", "tp"], ("write FIELD=VALUE",)),
        (["llama-3-8b", "8xh100", "--fix", "max_running=512", "--fix", "step_tokens=256"], ("step_tokens=512",)),
        (["llama-3-8b", "8xh100", "--fix", "num_blocks=3"], ("num_blocks=144",)),
        (["llama-3-8b", "1xh100", "--fix", "num_blocks=90000"], ("does not fit", "cache")),
        (["llama-3-8b", "8xh100", "--rate", "0"], ("--rate 0", "a finite number above 0")),
        (["llama-3-8b", "8xh100", "--rate", "-3"], ("--rate -3", "a finite number above 0")),
        (["llama-3-8b", "8xh100", "--rate", "nan"], ("--rate nan", "a finite number above 0")),
        (["llama-3-8b", "8xh100", "--rate", "inf"], ("--rate inf", "a finite number above 0")),
        (["llama-3-8b", "8xh100", "--prompt", "0"], ("--prompt 0", "a finite number above 0")),
        (["llama-3-8b", "8xh100", "--max-tpot", "0"], ("--max-tpot 0", "a finite number above 0")),
        (["llama-3-8b", "8xh100", "--seq", "2048"], ("--seq says how a model is trained",)),
        (["llama-3-8b", "8xh100", "--must", "tp<=4"], ("--must says how a model is trained",)),
        (["llama-3-8b", "0xh100"], ("0 devices",)),
        (["llama-3-8b", "8xh100", "--memory-limit", "10GB", "--fix", "tp=1", "--fix", "pp=1"], ("does not fit",)),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line_that_helps(arguments: list[str], words: tuple[str, ...]):
    with pytest.raises(MeshwrightError) as caught:
        main(["plan", *arguments, "--serve"])
    line = str(caught.value)
    assert "\n" not in line
    for word in words:
        assert word in line


@pytest.mark.parametrize("nearest", [("--rate", "100000"), ("--max-ttft", "0.001"), ("--prompt", "9000")])
def test_what_is_named_as_nearest_is_feasible(nearest: tuple[str, str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(MeshwrightError) as caught:
        main([*SERVE, *nearest])
    option, value = str(caught.value).partition("nearest: ")[2].replace(",", " ").split()[:2]
    assert main([*SERVE, "--rate", "1", option, value]) == 0
    capsys.readouterr()


def test_options_of_a_server_need_serve():
    with pytest.raises(InputError, match="--rate says what a server is asked; add --serve"):
        main(["plan", "demo-s", "local:2", "--rate", "3"])


def test_what_is_planned_is_printed_and_written(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file = tmp_path / "serve.toml"
    assert main([*SERVE, "--fix", "tp=2", "--precision", "fp16", "-o", str(file)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for word in ("tokens/s", "first", "between", "answers most per device", "memory bandwidth limits it", "fastest",
                 f"plan written to {file}"):  # fmt: skip
        assert word in shown
    plan = ServingPlan.load(file)
    assert (plan.layout.tp, plan.layout.precision) == (2, "fp16")
    assert plan.why in shown
    assert is_serving(file)
    assert ServingPlan.from_toml(plan.to_toml()) == plan
    assert priced(plan).utilisation < 1


def test_a_plan_for_serving_is_not_taken_for_a_training(tmp_path: Path):
    file = tmp_path / "serve.toml"
    plan_serving(LLAMA, load_cluster("8xh100"), REQUESTS).plan.save(file)
    with pytest.raises(InputError, match=r"serve\.toml: a plan for serving"):
        Plan.load(file)


def test_an_illegal_layout_cannot_be_built():
    plan = plan_serving(LLAMA, load_cluster("8xh100"), REQUESTS).plan
    for change, rule in (
        ({"tp": 3, "replicas": 1}, "tp-heads"),
        ({"replicas": 64}, "world"),
        ({"num_blocks": 1}, "cache"),
        ({"pp": 9, "replicas": 1, "tp": 1}, "world"),
    ):
        layout = Layout.model_validate({**plan.layout.model_dump(), **change})
        with pytest.raises(RuleError) as caught:
            ServingPlan(model=plan.model, cluster=plan.cluster, requests=plan.requests, layout=layout)
        assert caught.value.rule == rule


def test_fields_are_read_from_text():
    assert parse_layout(["tp=2", "layers_per_stage=3,5", "precision=fp32"]) == {
        "tp": 2, "layers_per_stage": (3, 5), "precision": "fp32",
    }  # fmt: skip
    for text, word in (("tpp=2", "did you mean `tp`"), ("tp=x", "got 'x'"), ("tp=0", "greater than 0")):
        with pytest.raises(InputError, match=word):
            parse_layout([text])
    with pytest.raises(InputError, match="already"):
        parse_layout(["tp=2", "tp=4"])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of eight replicas."""
    path = tmp_path_factory.mktemp("plans") / "serve.toml"
    plan_serving(LLAMA, load_cluster("8xh100"), REQUESTS).plan.save(path)
    return path


def test_it_is_shown(file: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["show", str(file)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("20 per second, of 2,048 tokens and 256 of answer", "replicas=8 tp=1 pp=1 ep=1", "weights 16.1 GB",
                  "share of all steps", "keys and values", "fastest"):  # fmt: skip
        assert words in shown
    with pytest.raises(InputError, match=r"--html: .* no timetable"):
        main(["show", str(file), "--html", "page.html"])


def test_another_choice_is_laid_beside_it(file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    other = tmp_path / "other.toml"
    assert main(["what-if", str(file), "--set", "tp=2", "--set", "rate_per_s=10", "-o", str(other)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("what if: R4 T2 P1", "weights 16.1 GB 8.03 GB -50.0%", "between tokens", "utilisation"):
        assert words in shown
    plan = ServingPlan.load(other)
    assert (plan.layout.tp, plan.layout.replicas, plan.requests.rate_per_s) == (2, 4, 10)
    for change, word in (("tp=1", "nothing is changed"), ("rate_per_s=9999", "sustains"), ("zero=1", "not a field"),
                         ("tp=3", "tp-heads"), ("num_blocks=99999", "nearest: num_blocks=29"),
                         ("rate_per_second=1", "did you mean `rate_per_s`")):  # fmt: skip
        with pytest.raises(MeshwrightError, match=word):
            main(["what-if", str(file), "--set", change])
    with pytest.raises(InputError, match="--set rate_per_s=3: `rate_per_s` is already 2"):
        main(["what-if", str(file), "--set", "rate_per_s=2", "--set", "rate_per_s=3"])


def test_vllm_takes_it(file: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["emit", str(file), "--to", "vllm"]) == 0
    printed = capsys.readouterr()
    layout = ServingPlan.load(file).layout
    read = parse(VLLM, words_of(printed.out)[3:])
    assert (read.tensor_parallel_size, read.pipeline_parallel_size, read.data_parallel_size) == (1, 1, 8)
    assert (read.max_num_seqs, read.max_num_batched_tokens) == (layout.max_running, layout.step_tokens)
    assert (read.max_model_len, read.num_gpu_blocks_override, read.block_size) == (2304, layout.num_blocks, 16)
    assert "20 per second" in printed.err
    with pytest.raises(InputError, match="--to vllm takes it"):
        main(["emit", str(file), "--to", "megatron"])


def test_vllm_is_told_of_experts_and_pipelines(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fix = {"tp": 2, "ep": 2, "pp": 2}
    plan_serving(
        load_model("mixtral-8x7b"), load_cluster("8xh100"), REQUESTS.model_copy(update={"rate_per_s": 1}), fix
    ).plan.save(tmp_path / "s.toml")
    assert main(["emit", str(tmp_path / "s.toml"), "--to", "vllm"]) == 0
    printed = capsys.readouterr()
    assert "--enable-expert-parallel" in words_of(printed.out)
    assert "ep=2: vLLM spreads whole experts over all 4 ranks" in printed.err
    assert "pp=2: vLLM has several steps under way" in printed.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("switch-base-128", "8xh100", "--prompt", "128"), "has experts of limited capacity"),
        (("mixtral-8x7b", "8xh100", "--fix", "ep=4"), ""),
        (("llama-3-8b", "2xh100"), ""),
    ],
)
def test_what_the_engine_does_not_run_is_noted(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["plan", *arguments, "--serve"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert words in shown
    assert ("note:" in shown) == bool(words)


def test_a_cache_of_cpu_ranks_is_no_larger_than_what_may_run(capsys: pytest.CaptureFixture[str]):
    """Their memory is others' too; with devices of their own the whole rest is cache."""
    result = plan_serving(
        load_model("demo-s"),
        load_cluster("local:2"),
        Requests(prompt_tokens=64, output_tokens=32, rate_per_s=1),
        {"tp": 2, "pp": 1},
    )
    layout = result.plan.layout
    assert layout.num_blocks == (layout.max_running + 1) * 6
    assert result.forecast.most.limit != CACHE
    assert main(["plan", "demo-s", "local:2", "--serve", "--prompt", "64", "--output", "32", "--fix", "tp=2"]) == 0
    assert "is the only layout that fits and sustains 1 requests/s" in " ".join(capsys.readouterr().out.split())
