"""What people see of a deployment at a terminal, and what is wrong with a machine."""
