"""Inside vLLM: copies between the engine's blocks and the agent's pool."""
