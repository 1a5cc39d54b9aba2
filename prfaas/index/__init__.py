"""What the world knows: which prefix is cached on which node of which cluster."""
