"""How fast the wire is, beside iperf3, over an emulated long link."""
