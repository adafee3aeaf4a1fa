"""A user's folder, with files to make mistakes with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.end_to_end.tiny import make_plan, tiny_model


@dataclass(frozen=True)
class Desk:
    """A user's folder, with files to make mistakes with."""

    folder: Path

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def plan(self, **strategy: int) -> Path:
        path = self.folder / "plan.toml"
        make_plan(tiny_model(self.folder), **strategy).save(path)
        return path

    def files(self) -> dict[str, bytes | None]:
        return {str(p.relative_to(self.folder)): p.read_bytes() if p.is_file() else None
                for p in self.folder.rglob("*")}  # fmt: skip
