"""In-memory state of a manager: members, sessions, traffic, instances."""
