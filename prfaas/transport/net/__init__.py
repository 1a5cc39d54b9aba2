"""Sockets, TLS, handshake, connections and the dialler."""
