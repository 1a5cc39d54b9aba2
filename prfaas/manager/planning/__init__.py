"""Plans over minutes: solver runs, role changes, path state.

Uses the scheduler's pure rules and the planning model. Imports nothing of routing, operations or the interfaces.
"""
