"""Operations on nodes: prefix copies, rebalancing, drains, roles, pool orders."""
