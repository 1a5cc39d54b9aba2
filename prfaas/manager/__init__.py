"""The global manager: index, membership, decisions; durable in Redis, answered over gRPC."""
