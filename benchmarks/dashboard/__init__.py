"""How soon the dashboard shows what has changed."""
