"""What benchmarks end with."""

from __future__ import annotations


class BenchError(Exception):
    """What keeps the benchmark from running, or a contestant that failed, in a sentence for people."""
