"""Room `planner` (level 3): enumerate, refuse, price, rank and explain strategies; imports no torch."""
