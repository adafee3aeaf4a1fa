"""What one rank measured of a run: the third witness, written as JSON beside the run's plan."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.core.errors import InputError
from meshwright.core.measures import MemoryBreakdown, Traffic
from meshwright.core.values import write_text

TracedAction = tuple[str, float, float]
"""An action as text, and when it began and ended: seconds after all ranks were let into the measured step."""


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank's measurements of one step, and the median step time of the run."""

    rank: int
    coordinates: dict[str, int]
    memory: MemoryBreakdown
    traffic: Traffic
    step_time_s: float = 0.0
    """Median over the run's steps, the first ones left out."""
    pipeline_s: float = 0.0
    """Wall time of the pipeline table in the measured step."""
    busy_s: float = 0.0
    """Of which in forwards and backwards."""
    waited_s: dict[str, float] = field(default_factory=dict)
    """Phase → seconds of a step that this rank stood still for communication: median over the same steps."""
    trace: tuple[TracedAction, ...] = ()
    """This rank's row of the program in the measured step, in order."""

    def save(self, folder: Path) -> None:
        """Write `folder`/rank-N.json."""
        folder.mkdir(parents=True, exist_ok=True)
        data = {
            "rank": self.rank,
            "coordinates": self.coordinates,
            "memory": self.memory.to_dict(),
            "traffic": self.traffic.to_list(),
            "step_time_s": self.step_time_s,
            "pipeline_s": self.pipeline_s,
            "busy_s": self.busy_s,
            "waited_s": self.waited_s,
            "trace": self.trace,
        }
        write_text(folder / f"rank-{self.rank}.json", json.dumps(data, indent=1))

    @classmethod
    def load(cls, path: Path) -> RankRecord:
        """Read one record. Raises InputError for a damaged file."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            memory, traffic = MemoryBreakdown(**data.pop("memory")), Traffic.from_list(data.pop("traffic"))
            trace = tuple((str(action), float(start), float(end)) for action, start, end in data.pop("trace", ()))
            return cls(memory=memory, traffic=traffic, trace=trace, **data)
        except KeyError as missing:
            raise InputError(f"{path}: not a record of a run: {missing} is not in it") from None
        except (ValueError, TypeError) as error:
            raise InputError(f"{path}: not a record of a run: {error}") from None

    @classmethod
    def load_all(cls, folder: Path) -> list[RankRecord]:
        """Every rank's record, by rank. Raises InputError where there is none."""
        records = sorted((cls.load(path) for path in folder.glob("rank-*.json")), key=lambda r: r.rank)
        if not records:
            raise InputError(f"{folder}: no measurements; a run leaves them when it ends, so let it end")
        return records
