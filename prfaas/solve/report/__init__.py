"""Output of the planner: screen, JSON, plots, manager settings."""
