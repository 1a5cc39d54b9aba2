"""Routing of requests: snapshot, policy, decisions, outcomes."""
