"""PPD's decision table, measured and shown: phase 1 of Algorithm 1 against endpoints that live."""
