"""OpenAI side of the router: requests, their tokens, conversations, and headers."""
