"""Hybrid-attention model of the executor."""
