"""Tests of `house`."""
