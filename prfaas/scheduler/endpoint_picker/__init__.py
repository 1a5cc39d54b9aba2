"""llm-d's endpoint picker as pure functions: its filters, scorers, picker, deciders and configuration file."""
