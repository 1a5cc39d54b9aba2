"""HTTP front end: routes, admission, proxying."""
