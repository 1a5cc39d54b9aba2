"""Interfaces of a manager: gRPC, HTTP, KV indexer contract, gauges."""
