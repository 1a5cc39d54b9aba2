"""The index of one manager in memory: tables of holders, and the matching of queries against them."""
