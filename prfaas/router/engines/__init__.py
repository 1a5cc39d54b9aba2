"""Engines of the router: discovery, health, and the legs that they serve."""
