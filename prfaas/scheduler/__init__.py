"""Decisions: pure functions of a snapshot, each with its reason."""
