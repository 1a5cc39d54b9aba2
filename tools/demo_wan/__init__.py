"""`make demo-wan`: two datacenters on one machine with an emulated long link between them, live in the dashboard."""
