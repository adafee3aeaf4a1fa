"""Tables of published measurements: a folder of JSON files `{name, description, rows}`, one row a measured run.

row   model, hardware, strategy   what ran; null where the source does not say
      measured                    iter_s, bytes in some unit, oom
      use                         `fit` may tune profiles, `check` may only judge them
      search_group                rows of one model, batch and number of devices
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.core.errors import InputError
from meshwright.core.values import parse_json, read_text

GIB, MIB, GB = 2**30, 2**20, 10**9
_RANK = re.compile(r"\brank (\d+)")
_PARTS = ("model", "hardware", "strategy", "measured")
_CORRECTED = {
    "models/llama_hf/configs/memory_profiling_bf16_llama-7b.json": {
        "hidden": 3584, "heads": 28, "kv_heads": 28, "ffn_hidden": 18944, "vocab": 152064,
    },
}  # fmt: skip
"""Part of a source → the model that ran, where the table's is read off the file's name. States and gathered heads of
this one's `fit` rows are within 0.2 % those of Qwen2.5-7B's sizes without grouped heads: 255.1M parameters a layer,
545M a head, where LLaMA-7B has 202M and 131M."""
_MEMORY_UNITS = {"peak_mem_gb": GB, "peak_mem_gib": GIB, "peak_mem_mib": MIB}
"""Field of `measured` → bytes. `nvidia-smi` prints MiB, and who rounds those to "GB" means GiB: see `peak_bytes`."""


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One measured run, as its source prints it."""

    table: str
    id: str
    use: str
    group: str | None
    model: Mapping[str, Any]
    hardware: Mapping[str, Any]
    strategy: Mapping[str, Any]
    measured: Mapping[str, Any]
    source: str
    """Title, and path of the file where it is one of several."""
    layout_check: str
    """`ok`, or why the degrees that are printed cannot be right."""

    @property
    def words(self) -> str:
        """What names the software that ran."""
        parts = (self.table, self.source, self.strategy.get("sharding"), self.strategy.get("notes"))
        return " | ".join(str(part) for part in parts if part)

    @property
    def rank(self) -> int | None:
        """Whose memory was measured, where the row says so: `rank 7` in its notes."""
        found = _RANK.search(str(self.strategy.get("notes")))
        return int(found[1]) if found else None

    @property
    def step_s(self) -> float | None:
        """Seconds of a step."""
        return self.measured.get("iter_s")

    @property
    def ran_out_of_memory(self) -> bool:
        return bool(self.measured.get("oom"))

    @property
    def peak_bytes(self) -> float | None:
        """Of the fullest device's memory, where the source prints it as a whole."""
        kind = str(self.measured.get("mem_kind") or "")
        for name, unit in _MEMORY_UNITS.items():
            if self.measured.get(name) is not None:
                binary = "nvidia-smi" in kind and unit == GB
                return float(self.measured[name]) * (GIB if binary else unit)
        states, peak = self.measured.get("model_states_mib"), self.measured.get("activation_peak_mib")
        return None if states is None or peak is None else (states + peak) * MIB


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """The rows of one file that are training runs."""

    name: str
    rows: tuple[PublishedRow, ...]


def read_tables(folder: Path | str) -> tuple[PublishedTable, ...]:
    """The tables of a folder that hold training runs, by name; other files are passed over.

    Raises InputError where there is no such folder, no table in it, or a table that cannot be read.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise InputError(f"{folder}: no such folder; give the one with the published tables (JSON files with `rows`)")
    read = (_read(file) for file in sorted(path.glob("*.json")))
    tables = tuple(table for table in read if table.rows)
    if not tables:
        raise InputError(f"{folder}: no table of training runs in it (a JSON file whose rows have {', '.join(_PARTS)})")
    return tables


def _read(file: Path) -> PublishedTable:
    data = parse_json(read_text(file), str(file))
    rows = data.get("rows")
    usable = [row for row in rows if _is_run(row)] if isinstance(rows, Sequence) else []
    name = str(data.get("name") or file.stem)
    return PublishedTable(name, tuple(_row(name, index, row) for index, row in enumerate(usable)))


def _is_run(row: object) -> bool:
    """Whether a row says what ran, and how long it took or what it held."""
    if not isinstance(row, Mapping) or not all(isinstance(row.get(part), Mapping) for part in _PARTS):
        return False
    if row.get("kind") not in (None, "training", "memory_microbench"):
        return False
    known = ("iter_s", "oom", "activation_peak_mib", *_MEMORY_UNITS)
    return any(row["measured"].get(name) is not None for name in known)


def _row(table: str, index: int, row: Mapping[str, Any]) -> PublishedRow:
    source = row.get("source")
    named = (
        " ".join(str(source[key]) for key in ("title", "path") if source.get(key))
        if isinstance(source, Mapping)
        else ""
    )
    corrected = next((sizes for part, sizes in _CORRECTED.items() if part in named), {})
    return PublishedRow(
        table=table,
        id=str(row.get("id") or f"{table}#{index}"),
        use=str(row.get("use") or "check"),
        group=row.get("search_group"),
        model={**row["model"], **corrected},
        hardware=row["hardware"],
        strategy=row["strategy"],
        measured=row["measured"],
        source=named,
        layout_check=str(row.get("layout_check") or "ok"),
    )
