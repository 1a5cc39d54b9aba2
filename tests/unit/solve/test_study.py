from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.errors import ConfigError
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import Deployment
from prfaas.solve.report import plots
from prfaas.solve.report.export import manager_settings
from prfaas.solve.report.screen import render
from prfaas.solve.study import Study, study
from tests.support.planner_inputs import case_study


def quick(deployment: Deployment, workload: Workload) -> Study:
    return study(deployment, workload)


def test_notes_name_the_assumptions() -> None:
    found = quick(*case_study())
    text = " ".join(found.notes)
    assert "extrapolated for 0.14% of the requests" in text
    assert "misses a point by 2.0%" in text
    assert "each prefill instance can send 1.6 Gbps" in text


def test_deployment_without_prfaas_clusters_has_no_threshold_and_no_plots(tmp_path: Path) -> None:
    deployment, workload = case_study()
    alone = quick(replace(deployment, prfaas=()), workload)
    assert [option.deployment.name for option in alone.options] == ["prfaas-pd", "homogeneous-pd"]
    assert "homogeneous-pd" in render(alone, explain=True)
    with pytest.raises(ConfigError, match="no threshold"):
        manager_settings(alone)
    with pytest.raises(ConfigError, match="at least one PrfaaS cluster"):
        plots.write_all(alone, tmp_path)


def test_a_cluster_that_can_serve_nothing_is_refused() -> None:
    deployment, workload = case_study()
    full = replace(deployment.pd[0], num_prefill=8)
    with pytest.raises(ConfigError, match="serves nothing"):
        quick(replace(deployment, pd=(full,)), workload)
