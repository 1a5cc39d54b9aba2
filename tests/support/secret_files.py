"""Files of secrets that only their owner may read."""

from pathlib import Path


def write_secret(path: Path, text: str) -> Path:
    """Write a file with mode 600, as a component requires of a file of keys."""
    path.touch(mode=0o600)
    path.write_text(text)
    return path


def write_deployment_secret(directory: Path) -> Path:
    """Write a file that can serve as a deployment's `secret_file`."""
    return write_secret(directory / "secret", 32 * "s")
