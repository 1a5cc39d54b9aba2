"""KV bytes of a prompt by model geometry."""
