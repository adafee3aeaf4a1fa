"""The folder of checkpoints: names, the manifest, what counts as whole, and the commit.

    checkpoints/
      step-00000010/            whole: its manifest lists every file with its length
        meshwright.json         the manifest
        .metadata  __0_0.distcp ...
      step-00000020.partial/    being written, or what a kill left behind; the next save removes it
      step-00000020.old/        set aside while the same step is saved again

Only renames make a checkpoint appear or disappear, so that a kill at any moment leaves the previous one.
Nothing here talks to other ranks: the writer calls it on one rank.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.core.errors import CheckpointError

FORMAT = 1
MANIFEST = "meshwright.json"
_NAME = re.compile(r"step-(\d{8,})(\.partial|\.old)?")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What stands beside the tensors."""

    step: int
    files: dict[str, int]
    """File name → length in bytes."""
    extra: dict[str, Any]
    """The caller's own values, as JSON gives them back."""
    format: int = FORMAT

    def to_json(self) -> str:
        """Raises CheckpointError where `extra` holds what JSON cannot."""
        try:
            return json.dumps(asdict(self), indent=1, allow_nan=False) + "\n"
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"extra of step {self.step} is not JSON: {error}; pass plain values") from None


def step_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` stands."""
    return folder / f"step-{step:08d}"


def partial_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written."""
    return folder / f"step-{step:08d}.partial"


def _old_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.old"


def _names(folder: Path) -> list[tuple[int, str]]:
    """(step, suffix) of each folder that looks like a checkpoint."""
    if not folder.is_dir():
        return []
    matches = [_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_dir()]
    return sorted((int(match[1]), match[2] or "") for match in matches if match)


def steps(folder: Path) -> list[int]:
    """Steps with a finished checkpoint, ascending. Whether its files are whole is not looked at."""
    return sorted({step for step, suffix in _names(folder) if suffix != ".partial"})


def open_step(folder: Path, step: int) -> tuple[Path, Manifest]:
    """Path and manifest of the checkpoint of `step`, once all its files have been found at full length.

    Raises:
        CheckpointError: it is missing or damaged; names the file.
    """
    path = step_path(folder, step)
    if not path.exists():
        path = _old_path(folder, step)
    if not path.exists():
        there = ", ".join(map(str, steps(folder))) or "none"
        raise CheckpointError(f"{folder}: no checkpoint of step {step}; there are: {there}")
    manifest = read_manifest(path)
    for name, num_bytes in manifest.files.items():
        try:
            found = (path / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path / name}: a file of the checkpoint is missing ({error.strerror})") from None
        if found != num_bytes:
            raise CheckpointError(f"{path / name}: damaged: {found} bytes, {num_bytes} were written")
    return path, manifest


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`. Raises CheckpointError."""
    file = path / MANIFEST
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise CheckpointError(f"{file}: format {data['format']}; this version reads format {FORMAT}")
        return Manifest(**data)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror}); the checkpoint is not whole") from None
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{file}: damaged: {type(error).__name__}: {error}") from None


def newest(folder: Path) -> tuple[int | None, list[CheckpointError]]:
    """The newest step that is whole, or None; and what is wrong with each newer one."""
    damages: list[CheckpointError] = []
    for step in reversed(steps(folder)):
        try:
            open_step(folder, step)
            return step, damages
        except CheckpointError as error:
            damages.append(error)
    return None, damages


def clean(folder: Path) -> None:
    """Remove what a killed save left behind."""
    for step, suffix in _names(folder):
        if suffix == ".partial":
            shutil.rmtree(partial_path(folder, step))
    for step, suffix in _names(folder):
        if suffix == ".old":
            _settle(folder, step)


def _settle(folder: Path, step: int) -> None:
    """A step saved twice: the old one goes if the new one is there, and comes back if not."""
    old, path = _old_path(folder, step), step_path(folder, step)
    if path.exists():
        _discard(folder, step, old)
    else:
        old.rename(path)


def _discard(folder: Path, step: int, path: Path) -> None:
    """Renamed first: a checkpoint that is half removed must not look like one."""
    doomed = partial_path(folder, step)
    path.rename(doomed)
    shutil.rmtree(doomed)


def commit(folder: Path, manifest: Manifest) -> None:
    """Turn the finished partial folder into the checkpoint of its step."""
    partial, path = partial_path(folder, manifest.step), step_path(folder, manifest.step)
    with (partial / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    _sync(partial)
    if path.exists():
        path.rename(_old_path(folder, manifest.step))
    partial.rename(path)
    _sync(folder)
    if _old_path(folder, manifest.step).exists():
        _settle(folder, manifest.step)


def _sync(folder: Path) -> None:
    """Names in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def prune(folder: Path, step: int, keep: int) -> None:
    """Of the checkpoints up to `step`, which has just been saved, keep the newest `keep` that are whole."""
    kept = 0
    for old in reversed([s for s in steps(folder) if s <= step]):
        if kept >= keep:
            _discard(folder, old, step_path(folder, old))
            continue
        try:
            open_step(folder, old)
            kept += 1
        except CheckpointError:
            continue
