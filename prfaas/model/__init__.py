"""What a request costs and what a deployment sustains (pure)."""
