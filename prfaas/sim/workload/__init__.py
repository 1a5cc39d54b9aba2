"""Simulated arrivals, conversations and request lengths."""
