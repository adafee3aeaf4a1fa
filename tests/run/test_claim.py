"""A folder is claimed by one process at a time, and by none that is dead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.core.errors import InputError
from meshwright.run.claim import claim
from meshwright.run.folder import RunFolder

HOLDER = """
import sys, time
from pathlib import Path
from meshwright.run.folder import RunFolder
with RunFolder(Path(sys.argv[1])).claim():
    print("held", flush=True)
    time.sleep(600)
"""


def test_the_second_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(run.path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=rf"process {holder.pid} on .* is training here"), run.claim():
            pass
        holder.kill()
        holder.wait()
    assert (run.path / "lock").exists()
    with run.claim():
        pass
    assert not (run.path / "lock").exists()


def test_a_claim_leaves_nothing_behind(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b"
    with claim(deep, deep / "lock"), pytest.raises(InputError, match="is training here"), claim(deep, deep / "lock"):
        pass
    assert list(tmp_path.iterdir()) == []
    with claim(deep, deep / "lock"):
        (deep / "plan.toml").write_text("")
    assert [path.name for path in deep.iterdir()] == ["plan.toml"]


def test_an_error_gives_the_claim_back(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), claim(tmp_path, tmp_path / "lock"):
        raise ZeroDivisionError
    with claim(tmp_path, tmp_path / "lock"):
        pass
