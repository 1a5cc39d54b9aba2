"""Finds what is wrong with a machine and with the configuration of the components on it, and says the remedy."""
