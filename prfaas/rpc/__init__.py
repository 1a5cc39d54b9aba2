"""RPC of the manager: generated messages, their translation, clients of routers and agents.

`ManagerClient` is for routers and commands, `Reporter` for agents. May import the index, the pool's layouts and the
transport's TLS.
"""
