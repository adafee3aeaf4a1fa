"""torchrun: this plan itself, started on every node."""

from __future__ import annotations

from meshwright.core.plan import Plan
from meshwright.planner.emit.common import Emitted, command_line, script, torchrun_words

TRAIN = "-m meshwright train plan.toml"


def emit(plan: Plan) -> Emitted:
    """The plan, and a script that is started once on each node. Nothing is lost: the ranks read the plan."""
    text = command_line([*torchrun_words(plan), TRAIN], {"--out": "run"}).rstrip("\n") + ' "$@"\n'
    return Emitted({"plan.toml": plan.to_toml(), "torchrun.sh": script(text)}, NOTES)


NOTES = ("text: what to train on is given behind the script, as in `--text corpus.txt`",)
