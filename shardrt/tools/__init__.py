"""Commands about runs and machines, behind `python -m shardrt`. They start no MPI in their own process."""
