"""A plan in the words of other tools: one file per tool, each with `emit(plan) -> Emitted`.

What a tool cannot express is a note, never a silence: each file names the fields of a strategy that it has said, and
:func:`common.left_out` tells of every other that is not at its default.
"""
