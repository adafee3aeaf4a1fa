"""Plan, train, verify, generate, export: the way of one model through all commands."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from meshwright.core.plan import Plan
from meshwright.run.folder import RunFolder
from meshwright.run.restore import restore_plain
from meshwright.train.metrics import read_metrics
from tests.end_to_end.conftest import STEPS, Trained
from tests.end_to_end.desk import Desk
from tests.end_to_end.shell import Result

Cli = Callable[..., Result]


def test_training_learns_and_leaves_a_run(trained: Trained) -> None:
    rows = read_metrics(trained.run)
    assert [row.step for row in rows] == list(range(STEPS))
    assert rows[-1].loss < rows[0].loss - 0.5
    assert [row.step for row in rows if row.eval_loss is not None] == [5, 11]
    assert "step 12/12" in trained.trained.out
    left = {path.name for path in trained.run.iterdir()}
    assert left == {"plan.toml", "run.toml", "data", "metrics.jsonl", "tensorboard", "checkpoints", "measured",
                    "loss.html", "logs"}  # fmt: skip
    assert {path.name for path in (trained.run / "checkpoints").iterdir()} == {"step-00000008", "step-00000012"}
    assert {path.name for path in (trained.run / "measured").iterdir()} == {"rank-0.json", "rank-1.json"}
    assert any((trained.run / "tensorboard").iterdir())
    assert Plan.load(trained.run / "plan.toml") == Plan.load(trained.plan)


def test_verify_says_equal(trained: Trained, cli: Cli) -> None:
    done = cli("verify", trained.run)
    assert done.status == 0, done.out
    assert "all 2 ranks: traffic equal to the byte" in done.out
    assert "differs" not in done.out


def tamper(run: Path, rank: int, change: Callable[[dict], None]) -> None:
    """Change one rank's record."""
    path = run / "measured" / f"rank-{rank}.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


@pytest.fixture
def copied(trained: Trained, tmp_path: Path) -> Path:
    """The run again, without its checkpoints and data: to be spoilt."""
    return Path(
        shutil.copytree(trained.run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints", "data", "logs"))
    )


def test_timeline_draws_what_the_ranks_did(trained: Trained, cli: Cli, tmp_path: Path) -> None:
    done = cli("timeline", trained.run, "--trace", tmp_path / "trace.json", "--svg", tmp_path / "step.svg")
    assert done.status == 0
    drawn = [line for line in done.out.splitlines() if line.startswith("r0:")]
    assert len(drawn) == 2
    assert all("F" in line and "B" in line for line in drawn)
    names = {
        e["args"]["name"] for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "M"
    }
    assert {"measured, rank 0", "forecast, rank 0"} <= names
    assert "<svg" in (tmp_path / "step.svg").read_text()


def test_a_run_is_drawn_as_it_was(trained: Trained, cli: Cli) -> None:
    done = cli("timeline", trained.run, "-m", "4")
    assert done.status == 1
    assert "a run is drawn as it was" in done.err


def test_verify_names_one_byte_of_traffic(copied: Path, cli: Cli) -> None:
    def one_byte(record: dict) -> None:
        row = next(row for row in record["traffic"] if row["phase"] == "gradients")
        row["wire_bytes"] += 1

    tamper(copied, 1, one_byte)
    done = cli("verify", copied)
    assert done.status == 1
    assert "differs: rank 1: reduce_scatter dp gradients: " in done.out


@pytest.mark.parametrize(
    ("category", "factor", "is_equal"),
    [("optimizer_bytes", 1.00001, False), ("activations_bytes", 1.06, False), ("activations_bytes", 1.01, True)],
)
def test_verify_judges_memory(category: str, factor: float, is_equal: bool, copied: Path, cli: Cli) -> None:
    def more(record: dict) -> None:
        record["memory"][category] = int(record["memory"][category] * factor) + 1

    tamper(copied, 0, more)
    done = cli("verify", copied)
    assert (done.status == 0) == is_equal
    assert (f"differs: rank 0: {category.removesuffix('_bytes')}: " in done.out) != is_equal


def test_verify_needs_every_rank(copied: Path, cli: Cli) -> None:
    (copied / "measured" / "rank-0.json").unlink()
    done = cli("verify", copied)
    assert done.status == 1
    assert "no measurements of rank 0: the plan has 2 ranks" in done.err


def test_generate_continues_the_prompt(trained: Trained, cli: Cli) -> None:
    first, again = (cli("generate", trained.run, "--prompt", "def main(", "--max-tokens", 8) for _ in range(2))
    assert first.status == 0, first.err
    assert first.out.startswith("def main(")
    assert len(first.out) > len("def main(\n")
    assert first.out == again.out


def test_transformers_load_what_is_exported(trained: Trained, tmp_path: Path, cli: Cli) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "exported"
    done = cli("export", trained.run, "--to", folder)
    assert done.status == 0, done.err
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "def main(argv):\n    return 0\n"
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    assert tokenizer.decode(ids[0]) == text
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, restore_plain(RunFolder(trained.run))(ids), rtol=0, atol=1e-4)


def test_a_finished_run_is_left_alone(trained: Trained, cli: Cli) -> None:
    before = {path: path.stat().st_mtime_ns for path in trained.run.rglob("*")}
    done = cli("train", trained.plan, "--out", trained.run, "--resume")
    assert done.status == 0
    assert "nothing left to do: 12 steps are done; to go on, give --steps more than 12" in done.out
    assert before == {path: path.stat().st_mtime_ns for path in trained.run.rglob("*")}


def test_a_tokenizer_larger_than_the_vocabulary(desk: Desk, refused: Callable[..., str], trained: Trained) -> None:
    tokenizer = json.loads((trained.run / "data" / "tokenizer.json").read_text())
    extra = [{"id": 300 + i, "content": f"<extra-{i}>", "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for i in range(5)]  # fmt: skip
    tokenizer["added_tokens"] += extra
    path = desk.write("tokenizer.json", json.dumps(tokenizer))
    line = refused("train", desk.plan(), "--stdlib", "--tokenizer", path, "--out", desk.folder / "run")
    assert "the tokenizer has 305 entries" in line
    assert "only 300" in line


def test_mistakes_with_a_finished_run(trained: Trained, desk: Desk, refused: Callable[..., str]) -> None:
    assert "the prompt is not valid UTF-8 text" in refused("generate", trained.run, "--prompt", "\udcff")
    assert "`seed`: Input should be less than 9223372036854775808" in refused(
        "generate", trained.run, "--prompt", "x", "--seed", 99999999999999999999
    )
    assert "`--prompt` is empty" in refused("generate", trained.run, "--prompt", "")
    assert "not an empty folder" in refused("export", trained.run, "--to", trained.run / "data")
    assert "holds a run already; add --resume" in refused("train", trained.plan, "--stdlib", "--out", trained.run)
