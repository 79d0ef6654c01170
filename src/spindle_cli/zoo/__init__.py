"""Workloads that come with Spindle: the paper's three (synthetic data), and `digits` (real data, for the demo)."""
