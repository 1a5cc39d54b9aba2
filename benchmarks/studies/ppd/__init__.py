"""PPD's experiment in the twin: the authors' deployments, conversations and costs (fitted to their measurements)."""
