"""Sending end of a link: outbox, chunker, connection workers."""
