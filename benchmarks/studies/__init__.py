"""Studies in the twin that reproduce figures and tables of the papers."""
