"""2D, 2.5D and 3D tensor parallelism: the layers of a plain decoder on a grid of ranks, put in from outside."""
