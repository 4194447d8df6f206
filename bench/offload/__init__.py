"""Times what offload is made of: copies, streamed updates, spill to disk (docs/howto/benchmarks.md)."""
