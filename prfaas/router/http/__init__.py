"""HTTP side of the router: routes, admission, refusals, and the proxy for other paths."""
