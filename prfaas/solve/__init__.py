"""Capacity planner behind `prfaas-solve`: input files and catalog, the study of a deployment, reports and plots.

It uses `prfaas.model` only. The manager reads deployments and traces with it.
"""
