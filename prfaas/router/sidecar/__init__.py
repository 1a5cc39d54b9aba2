"""`prfaas-sidecar`: serves a decode engine behind a gateway whose header names the prefill engine, like llm-d's sidecar."""
