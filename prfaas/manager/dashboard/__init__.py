"""Dashboard of the manager: static pages, live data by server-sent events, what-if questions. See docs/dashboard.md."""
