"""Benchmark of the delay until the dashboard shows a change."""
