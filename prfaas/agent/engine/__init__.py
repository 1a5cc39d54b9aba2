"""Protocol between an engine and its agent: messages, shared-memory ring, client and server."""
