"""Room `run` (level 7): where am I, start my ranks, and say in one line which of them failed."""
