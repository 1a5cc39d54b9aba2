"""Durable record in Redis: replication, the writer of each cluster, and the embedded Redis."""
