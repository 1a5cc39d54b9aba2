"""The OpenAI-compatible front door of a PD cluster."""
