"""The wire: moves numbered byte ranges between machines over several TCP connections."""
