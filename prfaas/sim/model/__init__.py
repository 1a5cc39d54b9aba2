"""Simulated engines, caches, network and faults."""
