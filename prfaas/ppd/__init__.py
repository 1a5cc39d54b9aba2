"""Measurement and display of PPD's decision table: phase 1 of Algorithm 1 against live endpoints."""
