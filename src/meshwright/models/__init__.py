"""Room `models` (level 5): plain single-device modules, their weights in and out. Knows nothing of other ranks."""
