"""Leakage measurement: panels, splits, statistics, verdicts.

``run_audit`` is the whole of it; ``read_panel`` reads what it needs, ``write_json`` and
``read_json`` keep what it gives.
"""

from headrace.audit.codec import from_dict, read_json, to_dict, write_json
from headrace.audit.config import AuditConfig
from headrace.audit.panel import Panel, make_panel
from headrace.audit.panel_files import panel_from_frame, read_panel
from headrace.audit.records import AuditResult
from headrace.audit.run import run_audit
from headrace.audit.sources import EmbeddingSource

__all__ = [
    "AuditConfig",
    "AuditResult",
    "EmbeddingSource",
    "Panel",
    "from_dict",
    "make_panel",
    "panel_from_frame",
    "read_json",
    "read_panel",
    "run_audit",
    "to_dict",
    "write_json",
]
