"""Room `rehearse` (level 6): the witnesses beside each other."""
