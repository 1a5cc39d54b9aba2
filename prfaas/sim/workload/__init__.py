"""Simulated requests: arrival times, sizes, conversations."""
