"""Tests of `claims`: what is commonly said about 3D-parallel training, beside what this project computes."""
