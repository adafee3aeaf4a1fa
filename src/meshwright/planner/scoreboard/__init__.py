"""The planner beside measurements that others published: read, express, replay, score."""
