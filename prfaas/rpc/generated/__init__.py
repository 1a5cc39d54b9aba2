"""Written by tools/generate_rpc.sh from proto; not edited by hand."""
