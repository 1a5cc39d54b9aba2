"""Measurement of a colocation profile."""
