"""Scenario files of the simulator."""
