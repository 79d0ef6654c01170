"""The runtime's benchmark: see scripts/bench_runtime.py."""
