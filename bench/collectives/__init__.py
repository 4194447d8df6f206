"""Times collectives in the manner of nccl-tests; docs/measuring.md says how to use it."""
