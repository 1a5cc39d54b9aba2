"""Discrete-event kernel: simulated time, meters, parallel runs."""
