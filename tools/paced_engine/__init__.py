"""Engine without a model: vLLM's HTTP API, real transfers, times from a profile, and answers that depend on the KV."""
