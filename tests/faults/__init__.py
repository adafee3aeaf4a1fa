"""Faults that users of such systems met, each as a small case with the right value."""
