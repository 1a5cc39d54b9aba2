"""Plans over minutes: solver runs, role changes, path state, link probes."""
