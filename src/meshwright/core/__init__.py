"""Room `core` (level 0): the nouns. Frozen values with a text form both ways; imports no torch."""
