"""llm-d's endpoint picker as pure functions: filters, scorers, picker, deciders, and its configuration file."""
