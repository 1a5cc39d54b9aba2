"""Routing of requests: snapshot, policy, decisions, outcomes.

`RequestRouter` is the entry. Imports the state and the scheduler's pure functions.
"""
