"""Benchmarks of the router: its front door, its decisions, its placement, and its control loops."""
