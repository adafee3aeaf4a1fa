"""Passes: Program → Program. They add to an order what its author need not think of."""
