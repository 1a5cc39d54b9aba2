"""What a look-up, an announcement and a decision cost."""
