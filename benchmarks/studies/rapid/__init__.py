"""RAPID-Serve's comparison in the twin: one shared node, chunked prefill, and disaggregation."""
