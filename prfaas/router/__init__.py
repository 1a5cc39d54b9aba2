"""OpenAI-compatible router: admits requests, chooses their route, and sends their legs to the engines."""
