"""Times collectives in the manner of nccl-tests; docs/howto/benchmarks.md says how to use it."""
