"""Operations on nodes: prefix copies, rebalancing, drains, role changes, pool orders.

`Operations` handles the calls of operators. `Commands` to agents are kept until their agent reports the end.
"""
