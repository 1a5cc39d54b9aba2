"""Endpoint picker: answers a gateway that speaks Envoy's external-processing protocol."""
