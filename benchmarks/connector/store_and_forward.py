"""The connector as most others work: nothing leaves before the whole prompt is computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from prfaas.connector.metadata import Save, SlotSpan
from prfaas.connector.vllm.connector import PrfaasConnector, StepMetadata


class StoreAndForwardConnector(PrfaasConnector):
    """Keeps back each chunk's copies until the step that computes the last token, and makes them after its forward pass."""

    _kept: dict[int, tuple[SlotSpan, ...]] | None = None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, StepMetadata)
        step = connector_metadata.step
        saves = tuple(save for save in map(self._keep_back, step.saves) if save is not None)
        super().bind_connector_metadata(StepMetadata(replace(step, saves=saves)))

    def _keep_back(self, save: Save) -> Save | None:
        if save.release is not None:
            return save
        self._kept = self._kept or {}
        spans = self._kept.pop(save.handle, ()) + save.spans
        if save.last:
            return replace(save, spans=spans)
        self._kept[save.handle] = spans
        return None

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass
