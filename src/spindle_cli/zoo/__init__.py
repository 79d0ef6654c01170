"""Workloads that come with Spindle: the paper's three on synthetic data, and `digits` on real data."""
