"""Manager of a deployment: index, membership and plans, durable in Redis; routes requests over gRPC.

`daemon.Manager` creates the parts: `state` in memory, `record` in Redis, `planning` and `routing` decide, `operations`
changes the deployment, `api` and `dashboard` serve. May import the index, the scheduler, the planning model and `rpc`.
"""
