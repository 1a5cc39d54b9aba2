"""Link measurement of `prfaas-bench`: send layers between two hosts, time them, and recommend settings."""
