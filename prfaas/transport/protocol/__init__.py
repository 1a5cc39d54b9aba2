"""Sans-I/O wire protocol: frames, control messages, object sizes."""
