"""The dashboard: a page of the manager's own, live by server-sent events. docs/dashboard.md describes it."""
