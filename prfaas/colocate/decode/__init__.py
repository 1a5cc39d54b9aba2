"""Decode process: request table and loop."""
