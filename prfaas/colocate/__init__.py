"""RAPID-Serve's executor: prefill and decode at once on one device, in two processes that share weights and KV."""
