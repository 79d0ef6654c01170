"""Whole models of `transformers`, made from small configurations, as tasks."""
