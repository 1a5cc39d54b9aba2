"""Dashboard of the manager: static pages, live data by server-sent events. See docs/dashboard.md."""
