"""The digital twin: a deployment under traffic as a discrete-event simulation that asks the real scheduler functions."""
