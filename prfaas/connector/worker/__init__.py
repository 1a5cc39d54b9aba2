"""Connector beside a rank's model: copies blocks between engine and pool."""
