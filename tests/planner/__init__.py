"""Tests of `planner`."""
