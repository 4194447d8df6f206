"""Times messages between pairs of ranks in the manner of OSU's micro-benchmarks; docs/howto/benchmarks.md."""
