"""What the digital twin must hold, measured."""
