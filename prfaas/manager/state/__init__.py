"""In-memory state of a manager: members and plan (`World`), sessions, traffic, instances, quiescence."""
