"""Scheduler side: asks the agent, parks requests, and plans copies."""
