"""Benchmarks of the index: matches, announcements, decisions, recovery."""
