"""A user's own table, from a file: completed where it has compute actions alone, and verified before it is used.

mine.csv     F0@0,F1@0,B0@0,B1@0          line 1 is rank 0; idle time may be shown by empty cells
             ,F0@1,B0@1,F1@1,B1@1
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.errors import ProgramError
from meshwright.core.program import COMPUTE_KINDS, Kind, Program, read_cells
from meshwright.core.values import read_text
from meshwright.schedule.draw import refused
from meshwright.schedule.passes.reductions import add_reductions
from meshwright.schedule.passes.transfers import add_transfers
from meshwright.schedule.verify import verify, verify_order
from meshwright.schedule.walk import Deadlock


def complete(written: Program, file: str, reduce: bool) -> Program:
    """The program of one step from a table as it stands in `file`.

    Transfers are added where it has nothing but compute actions, reductions where it has none and `reduce` asks for
    them; without `reduce`, those of the table are left out.

    Raises:
        ProgramError: the table cannot run: one line with line and cell of the file, or for a deadlock the drawn table.
    """
    kinds = {action.kind for row in written.rows for action in row}
    try:
        if kinds <= set(COMPUTE_KINDS):
            verify_order(written)
            built = add_transfers(written)
        else:
            verify(written)
            built = written
    except Deadlock as deadlock:
        fault = str(deadlock).removeprefix(f"{written.name}: ")
        raise refused(written, fault, deadlock.waiting.items()) from None
    except ProgramError as error:
        raise _in_file(error, written, file) from None
    if not reduce:
        return _without_reductions(built)
    return built if kinds & {Kind.ARM, Kind.REDUCE} else add_reductions(built)


def _without_reductions(program: Program) -> Program:
    rows = (tuple(a for a in row if a.kind not in (Kind.ARM, Kind.REDUCE)) for row in program.rows)
    return replace(program, rows=tuple(rows))


def _in_file(error: ProgramError, written: Program, file: str) -> ProgramError:
    """The fault in one line, with the cell of the file that stands first in it."""
    fault = str(error).splitlines()[0]
    if "deadlock" in fault:
        return error
    fault = fault.removeprefix(f"{written.name}: ")
    if not error.places:
        return ProgramError(f"{file}: {fault}")
    cells = read_cells(read_text(file), file)
    rank, index = min(error.places)
    return ProgramError(f"{file}, line {rank + 1}, cell {cells[rank][index][0]}: {fault}", error.places)
