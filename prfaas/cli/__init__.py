"""Entry points: parse, load the configuration, call one function."""
