"""Digital twin behind `prfaas-sim`: a discrete-event simulation that decides with the scheduler's functions.

`run` simulates a `scenario`: `stations` are pools of servers, `twin` has engines, caches and links one by one.
`kernel` holds simulated time and meters, `model` the simulated parts, `workload` the requests.
It may use `prfaas.scheduler`, `prfaas.cachepool`, `prfaas.model` and `prfaas.solve`, and no daemon.
"""
