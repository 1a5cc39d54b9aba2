"""Capacity of a deployment: throughput, bounds, queueing, latency."""
