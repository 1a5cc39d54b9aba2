"""Worker side: copies blocks between engine and pool."""
