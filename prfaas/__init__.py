"""Prefill-as-a-Service: long prompts are prefilled elsewhere, their KV streams in while it is computed."""

__version__ = "0.1.0"
