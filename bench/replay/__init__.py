"""Replays the communication of a recorded job on the ranks that run; docs/howto/benchmarks.md has more."""
