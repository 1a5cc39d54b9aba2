"""Simulated parts of a deployment: requests, engines, caches, network, faults."""
