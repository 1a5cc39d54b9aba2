"""Decision and execution of one request."""
