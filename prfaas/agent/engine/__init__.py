"""Protocol between agent and engine: messages, shared-memory ring, client, server."""
