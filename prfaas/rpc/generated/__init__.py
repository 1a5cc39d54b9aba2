"""Written by tools/generate_rpc.sh from proto/prfaas/v1; not edited by hand."""
