"""Engines of the router: health, and the legs that they serve."""
