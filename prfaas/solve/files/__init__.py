"""Input files of the planner: deployments, profiles, traces, the catalog."""
