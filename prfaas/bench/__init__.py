"""What `prfaas-bench` measures between two hosts."""
