"""Imports vLLM where it is installed, once, and without its dependencies' own warnings."""

from __future__ import annotations

import importlib
import importlib.util
import warnings

collect_ignore = [] if importlib.util.find_spec("vllm") else ["test_vllm_interface.py"]

if not collect_ignore:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other projects' modules as they are imported
        importlib.import_module("prfaas.connector.vllm")
