"""Prefix blocks of a node: lookup, storage, promotion from the SSD, pins, and copies to other nodes."""
