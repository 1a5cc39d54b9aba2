"""Prefill and decode at once against chunked hybrid batching, same device, same model, one run."""
