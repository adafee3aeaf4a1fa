"""How bytes move between the ranks of one group. One file per way; `base` is what all of them offer."""
