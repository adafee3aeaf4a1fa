"""Room `cost` (level 1): pure formulas, each a list of named terms with its source. Imports no torch."""
