"""A colocated instance against vLLM's chunked prefill."""
