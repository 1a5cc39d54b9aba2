"""A deployment of ten clusters of a thousand instances each, and a trace of 100,000 lines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import yaml

_NUM_PRFAAS, _NUM_PD, _NUM_INSTANCES, _NUM_LINES = 4, 6, 1000, 100_000


def write_deployment(folder: Path, *, with_links: bool) -> Path:
    """Clusters of unlike egress or, `with_links`, a link of its own for each pair."""
    prfaas = [
        {
            "name": f"far{i}",
            "profile": "h200-internal-1t",
            "instances": _NUM_INSTANCES,
            "bandwidth": f"{2000 + 500 * i}Gbps",
        }
        for i in range(_NUM_PRFAAS)
    ]
    pd = [{"name": f"near{i}", "profile": "h20-internal-1t", "instances": _NUM_INSTANCES} for i in range(_NUM_PD)]
    links = [
        {"source": far["name"], "target": near["name"], "bandwidth": f"{400 + 100 * ((i + j) % 5)}Gbps"}
        for i, far in enumerate(prfaas)
        for j, near in enumerate(pd)
    ]
    deployment = {"model": "internal-1t-hybrid", "trace": "trace.csv", "prfaas": prfaas, "pd": pd}
    path = folder / f"{'links' if with_links else 'egress'}.yaml"
    path.write_text(yaml.safe_dump(deployment | ({"links": links} if with_links else {})))
    return path


def write_trace(folder: Path) -> None:
    """Log-normal lengths, uniform outputs."""
    generator = np.random.default_rng(1)
    prompts = np.clip(generator.lognormal(9.9, 1.0, _NUM_LINES), 128, 131_072).astype(int)
    outputs = generator.integers(100, 2000, _NUM_LINES)
    rows = (f"{at},{prompt},{output}" for at, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)))
    (folder / "trace.csv").write_text("timestamp,input_length,output_length\n" + "\n".join(rows) + "\n")
