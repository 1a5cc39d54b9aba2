"""PrfaasConnector and the readers of vLLM's objects: the only part of the connector that imports vLLM."""
