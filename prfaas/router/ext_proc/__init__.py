"""An endpoint picker for gateways: Envoy's external processing, as the Gateway API Inference Extension speaks it (GAIE 004)."""
