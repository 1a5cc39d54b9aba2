"""Benchmarks of the digital twin."""
