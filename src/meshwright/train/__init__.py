"""Room `train` (level 6): the step, the optimizer, the learning rate, data, metrics, and the loop around them."""
