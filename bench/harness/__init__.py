"""What all benchmarks share: command lines, cases that alternate, checks, percentiles, tables and JSON."""
