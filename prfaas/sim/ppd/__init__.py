"""PPD's experiment in the twin: its authors' deployments, conversations and table, with costs fitted to their measurements."""
