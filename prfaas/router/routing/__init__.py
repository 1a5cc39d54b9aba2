"""Routing of requests: the decision, the manager that makes it, its execution, and the record of each request."""
