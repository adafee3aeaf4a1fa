"""Room `parallel` (level 5): one file per technique, and `apply`, which composes them in one visible order.

Knows nothing of model families: models and techniques meet in the names of `core.placement`.
"""
