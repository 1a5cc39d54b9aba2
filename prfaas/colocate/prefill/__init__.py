"""Prefill process: request queue and loop."""
