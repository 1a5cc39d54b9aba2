"""An engine's own device cache in the index: its KV events decoded, ordered and turned into pool events."""
