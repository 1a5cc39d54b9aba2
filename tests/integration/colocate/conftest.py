"""Colocated instances, started once per model and module."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.colocate.instance import Instance
from tools.processes import Children
from tools.real_model import make_real_model
from tools.tiny_models import make_model

MakeInstance = Callable[..., Instance]
_REAL_MODEL = Path.home() / ".cache" / "prfaas" / "smollm2"  # Downloaded once per user.


@pytest.fixture(scope="module")
def make_instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeInstance]:
    """Start an instance of a model family, or of `smollm2`; keywords are those of `Instance`."""
    with Children(tmp_path_factory.mktemp("colocate")) as children:

        def make(family: str, **options: object) -> Instance:
            directory = tmp_path_factory.mktemp(family)
            model = make_real_model(_REAL_MODEL) if family == "smollm2" else make_model(family, directory / family)
            return Instance(children, directory, model, **options)  # type: ignore[arg-type]

        yield make
