"""Engines' own KV events, followed and translated into index events."""
