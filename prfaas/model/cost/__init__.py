"""Costs of one request: profiles, length distributions, decode capacity."""
