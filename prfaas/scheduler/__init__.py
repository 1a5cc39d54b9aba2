"""Scheduling decisions as pure functions of a snapshot. Each decision carries its reason."""
