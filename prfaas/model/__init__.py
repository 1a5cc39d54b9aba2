"""Throughput model of the paper: what a request costs and what a deployment sustains.

One package builds on the next: `kv` (bytes of KV) and `cost` (times and lengths), `deployment`, `capacity`
(throughput, bounds, latency), `planning` (the best plan). All of it is pure.
"""
