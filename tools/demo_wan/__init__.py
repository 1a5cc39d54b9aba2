"""Demonstration of two clusters over an emulated long link (`make demo-wan`)."""
