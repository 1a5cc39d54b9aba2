"""Profiles from noisy measurements of every catalogued model on several GPUs."""

import random
from pathlib import Path

import numpy as np
import pytest
import yaml

from prfaas.errors import ConfigError
from prfaas.model.cost.profile import Profile
from prfaas.model.cost.roofline import roofline
from prfaas.solve.endpoint_profile import repeated
from prfaas.solve.files import catalog
from prfaas.solve.files.profile_file import read_profile

LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768)
BATCHES, CONTEXTS = (1, 2, 4, 8, 16, 32), (1024, 4096)
NOISE = 0.02


def shapes() -> list[Profile]:
    """Return the inferred profile of each catalogued model on each GPU that holds it."""
    found = []
    for name in catalog.names("models"):
        for gpu in ("H20", "H200", "B200"):
            try:
                found.append(roofline(catalog.find_model(name), catalog.find_gpu(gpu), 8))
            except ConfigError:
                continue
    return found


SHAPES = shapes()


def worst_error(file: Path, seed: int) -> float:
    """Measure a profile with noise, read it, and return the greatest relative error of its curves."""
    chance = random.Random(seed)
    true = SHAPES[seed % len(SHAPES)]
    assert true.decode is not None

    def measured(seconds: float) -> float:
        return repeated(lambda: seconds * (1 + chance.gauss(0, NOISE)), most=12).seconds

    prefill = [{"tokens": n, "seconds": measured(true.prefill.seconds(n))} for n in LENGTHS]
    decode = [
        # The median of the many gaps of a batch has less noise than one sample.
        {"batch": b, "context": c, "step": measured(true.decode.step_seconds(b, c))}
        for c in CONTEXTS
        for b in BATCHES
    ]
    content = {"name": "p", "hardware": "X", "source": "test", "prefill": {"fit": "weighted", "points": prefill}}
    file.write_text(yaml.safe_dump({**content, "decode": {"points": decode}}))
    found = read_profile(file)
    assert found.decode is not None
    lengths = np.geomspace(LENGTHS[0], LENGTHS[-1], 20)
    errors = [abs(found.prefill.seconds(n) / true.prefill.seconds(n) - 1) for n in lengths]
    errors += [
        abs(found.decode.step_seconds(b, c) / true.decode.step_seconds(b, c) - 1) for b in BATCHES for c in CONTEXTS
    ]
    return max(errors)


@pytest.mark.parametrize(("start", "end"), [(0, 50), pytest.param(50, 1000, marks=pytest.mark.soak)])
def test_curves_from_noisy_measurements_are_close(tmp_path: Path, start: int, end: int) -> None:
    errors = [worst_error(tmp_path / "p.yaml", seed) for seed in range(start, end)]
    assert sum(error <= 0.03 for error in errors) >= 0.99 * len(errors)
