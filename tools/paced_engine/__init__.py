"""An engine without a model: vLLM's HTTP, a real agent's transfers, times from a profile, answers that show wrong KV."""
