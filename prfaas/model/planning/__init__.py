"""Search for the best plan of a deployment."""
