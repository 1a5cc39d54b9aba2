"""Wire protocol and TCP links: moves numbered byte ranges between agents. Knows nothing of KV.

If a connection is lost, unacknowledged chunks leave over the other connections of the link (`sender/outbox.py`). If all
are lost, the link reconnects, the sender repeats OPEN, and HAVE names what has arrived. After `silence_seconds` without
progress both ends fail the transfer as `unreachable`, and the decode engine computes the prompt itself.
"""
