"""Numbers for people. Decimal units only (1 GB = 10⁹ bytes), always printed with the number."""

from __future__ import annotations

from math import isfinite

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def format_bytes(num_bytes: float) -> str:
    """`0 B`, `512 B`, `1.50 kB`, `80.0 GB`: three significant digits; whole bytes below 1 kB."""
    size, unit = float(num_bytes), 0
    while abs(size) >= 999.5 and unit < len(_BYTE_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{_three_digits(size)} {_BYTE_UNITS[unit]}"


def counted(number: int, what: str, plural: str | None = None) -> str:
    """`1 rank`, `8 ranks`, `1,024 ranks`."""
    return f"{number:,} {what if number == 1 else plural or f'{what}s'}"


def unit_of(num_bytes: float) -> str:
    """The unit in which :func:`format_bytes` prints this size; for columns that share one."""
    return format_bytes(num_bytes).split()[1]


def in_unit(num_bytes: float, unit: str) -> str:
    """The number alone: `80.0` for 80 GB in "GB"; `<0.01` for what would look like nothing."""
    value = num_bytes / 1000 ** _BYTE_UNITS.index(unit)
    if unit == "B" or value == 0:
        return f"{value:.0f}"
    return "<0.01" if 0 < value < 0.005 else _three_digits(value)


def format_time(seconds: float) -> str:
    """`0 s`, `4.50 µs`, `12.3 ms`, `1.23 s`, `2 min 03 s`, `1 h 02 min`, `3 d 04 h`."""
    if not isfinite(seconds) or seconds == 0:
        return f"{seconds:.0f} s"
    if abs(seconds) < 59.95:
        for scale, unit in ((1e6, "µs"), (1e3, "ms"), (1.0, "s")):
            if abs(seconds) * scale < 999.5:
                return f"{_three_digits(seconds * scale)} {unit}"
    whole = round(seconds)
    for large, small, names in ((86400, 3600, "d h"), (3600, 60, "h min"), (60, 1, "min s")):
        if abs(whole) >= large:
            first, second = names.split()
            return f"{whole // large} {first} {whole % large // small:02d} {second}"
    return f"{whole} s"


def _three_digits(value: float) -> str:
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{decimals}f}"
