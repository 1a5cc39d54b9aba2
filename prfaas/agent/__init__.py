"""One process per machine: owns the pool and the wire, serves the engines beside it."""
