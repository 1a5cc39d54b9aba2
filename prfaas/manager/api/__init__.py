"""Interfaces of a manager: gRPC, HTTP, gauges."""
