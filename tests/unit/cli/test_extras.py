"""A command whose extra is missing says which one to install."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from prfaas.cli import startup
from prfaas.errors import MissingExtraError


def test_a_module_whose_needs_are_met_is_loaded() -> None:
    assert startup.load_extra("prfaas.errors", extra="manager").MissingExtraError is MissingExtraError


def test_a_missing_dependency_names_the_extra_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_the_absent.py").write_text("import absent_dependency.part\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingExtraError, match=r"absent_dependency is not installed.*pip install 'prfaas\[manager\]'"):
        startup.load_extra("needs_the_absent", extra="manager")
    assert "needs_the_absent" not in sys.modules


def test_a_missing_module_of_our_own_is_our_bug() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"prfaas\.nothing"):
        startup.load_extra("prfaas.nothing", extra="router")
