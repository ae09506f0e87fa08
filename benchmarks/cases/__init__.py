"""What the benchmarks run: each case in a process of its own, one JSON line a result."""
