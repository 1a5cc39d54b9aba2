"""Outbound and inbound KV transfers of a node."""
