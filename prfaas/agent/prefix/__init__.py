"""Prefix blocks of a node: lookup, storage, SSD promotion, pins, copies to other nodes."""
