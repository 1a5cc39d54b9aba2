"""Connector beside the engine's scheduler: asks the agent, parks requests, names what to copy."""
