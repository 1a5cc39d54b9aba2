"""OpenAI requests: parsing, tokens, conversations, headers."""
