"""Device shares and step execution on CPU and GPU."""
