"""The manager's RPC surface: generated messages, their translation, typed clients."""
