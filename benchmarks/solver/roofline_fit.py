"""Fit of the roofline's constants to PrfaaS Table 3, and the errors for each model with and without it in the fit."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

import numpy as np

from benchmarks.solver.paper import TABLE_3_PROFILES, TABLE_3_TOKENS
from prfaas.model.cost.curve import FloatArray
from prfaas.model.cost.roofline import PrefillConstants, prefill_curve
from prfaas.model.kv.parameters import ModelSize
from prfaas.solve.files import catalog

_H200 = catalog.find_gpu("H200")
_STEP = 1e-5


@dataclass(frozen=True)
class Errors:
    """Relative errors of a model's prefill times at `TABLE_3_TOKENS`, with the constants in use and with a fit without it."""

    model: str
    fitted: list[float]
    left_out: list[float]


def errors() -> list[Errors]:
    """Return the errors of each model of Table 3 whose size is published."""
    models = [name for name in TABLE_3_PROFILES if catalog.find_model(name).size is not None]
    return [
        Errors(
            model,
            np.expm1(_log_errors(model, PrefillConstants())).tolist(),
            np.expm1(_log_errors(model, fit([name for name in models if name != model]))).tolist(),
        )
        for model in models
    ]


def fit(models: Collection[str]) -> PrefillConstants:
    """Return the constants of the least squares of logarithmic errors (Gauss-Newton)."""
    start = PrefillConstants()
    logs = np.log([start.prompt_seconds, start.bytes_per_root_parameter, start.attention_efficiency])

    def residuals(logs: FloatArray) -> FloatArray:
        constants = PrefillConstants(*np.exp(logs).tolist())
        return np.concatenate([_log_errors(model, constants) for model in models])

    for _ in range(20):
        now = residuals(logs)
        slopes = np.stack([(residuals(logs + _STEP * unit) - now) / _STEP for unit in np.eye(3)], axis=1)
        logs = logs - np.linalg.lstsq(slopes, now, rcond=None)[0]
    return PrefillConstants(*np.exp(logs).tolist())


@cache
def _published(model: str) -> tuple[ModelSize, FloatArray]:
    size, profile = catalog.find_model(model).size, catalog.find_profile(TABLE_3_PROFILES[model])
    assert size is not None
    return size, np.array([profile.prefill.seconds(tokens) for tokens in TABLE_3_TOKENS])


def _log_errors(model: str, constants: PrefillConstants) -> FloatArray:
    size, published = _published(model)
    return np.log(prefill_curve(size, _H200, 8, constants).many(np.array(TABLE_3_TOKENS, float)) / published)
