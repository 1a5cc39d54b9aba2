"""Receiving end: server, readers, inbound transfers, flow control."""
