"""The connector measured: copies, time to first token over distance, cost to the engine."""
