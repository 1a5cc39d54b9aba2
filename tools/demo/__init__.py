"""`make demo`: two datacenters on this machine, real vLLM in both, and what happens to six requests."""
