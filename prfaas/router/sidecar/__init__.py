"""`prfaas-sidecar`: runs beside a decode engine behind a gateway whose header names the prefill engine, as llm-d's does."""
