"""Prefix blocks of a node: lookup, storage, promotion from the SSD, and copies to other nodes."""
