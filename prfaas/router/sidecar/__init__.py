"""`prfaas-sidecar`: beside a decode engine, behind a gateway that names the prefill engine in a header, as llm-d's does."""
