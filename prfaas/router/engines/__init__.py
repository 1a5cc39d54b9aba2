"""Engines behind a router: health, discovery, request legs."""
