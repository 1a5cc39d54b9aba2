"""Terminal views of a deployment, changes to it, and diagnosis of a machine."""
