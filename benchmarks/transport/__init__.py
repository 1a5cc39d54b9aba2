"""Benchmark of the transport over emulated links, beside iperf3 and other transfer engines."""
