"""All scenarios of catalogue rows."""

from __future__ import annotations

from . import (
    scenario_attention,
    scenario_elementwise,
    scenario_experts,
    scenario_fused_experts,
    scenario_norms,
    scenario_paged,
    scenario_quantization,
    scenario_sampling,
)
from .scenario import SCENARIOS, Scenario

__all__ = [
    "SCENARIOS",
    "Scenario",
    "scenario_attention",
    "scenario_elementwise",
    "scenario_experts",
    "scenario_fused_experts",
    "scenario_norms",
    "scenario_paged",
    "scenario_quantization",
    "scenario_sampling",
]
