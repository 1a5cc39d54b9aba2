"""Durable record: replication, the cluster writer, the embedded Redis."""
