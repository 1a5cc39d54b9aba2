import re
from dataclasses import replace
from html import escape

import numpy as np
import pytest

from prfaas.errors import ConfigError
from prfaas.solve.report import plots
from prfaas.solve.report.export import manager_settings
from prfaas.solve.report.page import to_html
from prfaas.solve.report.screen import answer
from prfaas.solve.study import study
from tests.support.planner_inputs import case_study


def test_notes_name_the_assumptions() -> None:
    found = study(*case_study())
    text = " ".join(found.notes)
    assert "extrapolated for 0.14% of the requests" in text
    assert "misses a point by 2.0%" in text
    assert "each prefill instance can send 1.6 Gbps" in text


def test_deployment_without_prfaas_clusters_has_no_threshold() -> None:
    deployment, workload = case_study()
    alone = study(replace(deployment, prfaas=()), workload)
    assert [option.deployment.name for option in alone.options] == ["prfaas-pd", "homogeneous-pd"]
    with pytest.raises(ConfigError, match="no threshold"):
        manager_settings(alone)
    assert list(plots.draw_all(alone)) == ["load"]


@pytest.mark.parametrize(("num_instances", "num_prefill"), [(8, None), (8, 1), (200, None)])
def test_plots_mark_the_plan_itself(num_instances: int, num_prefill: int | None) -> None:
    deployment, workload = case_study()
    pd = replace(deployment.pd[0], num_instances=num_instances, num_prefill=num_prefill)
    found = study(replace(deployment, pd=(pd,)), workload)
    plan, figures = found.main.plan, plots.draw_all(found)
    marked = {"split": plan.num_prefill, "threshold": (plan.threshold_tokens or 0) / 1000}
    for name, place in marked.items():
        lines = {str(line.get_label()): line for line in figures[name].axes[0].get_lines()}
        assert lines["plan"].get_xydata() == pytest.approx(np.array([[place, plan.system_throughput]]))
        system = next(line for label, line in lines.items() if "Λ_max" in label)
        if num_prefill is None or name == "threshold":
            assert max(np.asarray(system.get_ydata())) <= plan.system_throughput * (1 + 1e-9)
    load = figures["load"].axes[0].get_lines()[0]
    assert max(np.asarray(load.get_xdata())) == pytest.approx(0.95 * plan.system_throughput)


def test_html_report_is_one_file_with_the_answer_and_every_plot() -> None:
    found = study(*case_study())
    page = to_html(found, answer(found))
    assert page.count("<svg") == 3 and len(page) < 200_000
    addresses = set(re.findall(r"""(?:src|href)=["']([^#"'][^"']*)""", page))
    assert not addresses, "the page loads nothing"
    assert all(escape(text) in page for _, text in answer(found))
    assert f"{found.main.plan.system_throughput:.2f}" in page


def test_a_cluster_that_can_serve_nothing_is_refused() -> None:
    deployment, workload = case_study()
    full = replace(deployment.pd[0], num_prefill=8)
    with pytest.raises(ConfigError, match="serves nothing"):
        study(replace(deployment, pd=(full,)), workload)
