"""Interfaces of a manager: gRPC, HTTP, the KV indexer's contract, gauges."""
