"""Durable record of the index in Redis."""
