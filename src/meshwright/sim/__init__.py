"""Room `sim` (level 2): the clock that times a Program; imports no torch."""
