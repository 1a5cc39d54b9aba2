"""RAPID-Serve's experiment in the twin: one shared node against chunked batching and disaggregation on the same GPUs."""
