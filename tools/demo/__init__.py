"""Demonstration of two clusters with real vLLM on this machine (`make demo`)."""
