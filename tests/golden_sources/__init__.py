"""Digests of every source that the generator makes of the benchmarks' workloads: what a change that should change nothing is held to."""
