"""arrowbank turns raw text and frozen models into Arrow datasets that trainers open with `load_from_disk`.

    from arrowbank import open_bank
    bank = open_bank("router/features", expect={"max_tokens": 256})
    bank.vectors(["a text"])        # [1, D] float16

The names below are the public ones; each is imported when it is first used, so `import arrowbank` loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from arrowbank.auditing import AuditConfig, audit
    from arrowbank.bank import Bank, FeatureBank, open_bank
    from arrowbank.bank.checks import Check
    from arrowbank.bank.trunk import open_trunk
    from arrowbank.building import BuildConfig, build
    from arrowbank.comparison import Comparison, compare
    from arrowbank.corpus.scan import ScanConfig, scan
    from arrowbank.corpus.tokenize import TokenizeConfig, tokenize
    from arrowbank.encoding import EncodeConfig, RunOptions, encode
    from arrowbank.encoding.estimate import Estimate, estimate
    from arrowbank.exporting import ExportConfig, export
    from arrowbank.heal.config import HealConfig
    from arrowbank.heal.healing import heal_draft
    from arrowbank.hub.pulling import pull
    from arrowbank.hub.pushing import PushConfig, push
    from arrowbank.in2.building import build_in2
    from arrowbank.in2.config import In2Config
    from arrowbank.in2.gate import verify_in2
    from arrowbank.in2.probes import ProbesConfig, build_probes
    from arrowbank.in2.scoring import ScoreConfig, score_probes
    from arrowbank.joining.merging import merge_banks
    from arrowbank.joining.selecting import SelectConfig, select_rows
    from arrowbank.leakage import Audit
    from arrowbank.models import ModelConfig
    from arrowbank.plan import BatchRules
    from arrowbank.report import ReportConfig, write_report
    from arrowbank.searching import Hit, SearchConfig, Searcher
    from arrowbank.targets.capturing import CaptureConfig, capture
    from arrowbank.targets.importing import ImportConfig, import_targets, import_to_deepspec
    from arrowbank.trainer import FeatureDataset, TargetDataset, collate_targets, open_targets
    from arrowbank.trunk.building import build_trunk
    from arrowbank.trunk.planning import TrunkConfig, TrunkData
    from arrowbank.verifying import verify

_HOME = {
    "Audit": "leakage",
    "AuditConfig": "auditing",
    "Bank": "bank",
    "BatchRules": "plan",
    "BuildConfig": "building",
    "CaptureConfig": "targets.capturing",
    "Check": "bank.checks",
    "Comparison": "comparison",
    "EncodeConfig": "encoding",
    "Estimate": "encoding.estimate",
    "ExportConfig": "exporting",
    "FeatureBank": "bank",
    "FeatureDataset": "trainer",
    "HealConfig": "heal.config",
    "Hit": "searching",
    "ImportConfig": "targets.importing",
    "In2Config": "in2.config",
    "ModelConfig": "models",
    "ProbesConfig": "in2.probes",
    "PushConfig": "hub.pushing",
    "ReportConfig": "report",
    "RunOptions": "encoding",
    "ScanConfig": "corpus.scan",
    "ScoreConfig": "in2.scoring",
    "SearchConfig": "searching",
    "Searcher": "searching",
    "SelectConfig": "joining.selecting",
    "TargetDataset": "trainer",
    "TokenizeConfig": "corpus.tokenize",
    "TrunkConfig": "trunk.planning",
    "TrunkData": "trunk.planning",
    "audit": "auditing",
    "build": "building",
    "build_in2": "in2.building",
    "build_probes": "in2.probes",
    "build_trunk": "trunk.building",
    "capture": "targets.capturing",
    "collate_targets": "trainer",
    "compare": "comparison",
    "encode": "encoding",
    "estimate": "encoding.estimate",
    "export": "exporting",
    "heal_draft": "heal.healing",
    "import_targets": "targets.importing",
    "import_to_deepspec": "targets.importing",
    "merge_banks": "joining.merging",
    "open_bank": "bank",
    "open_targets": "trainer",
    "open_trunk": "bank.trunk",
    "pull": "hub.pulling",
    "push": "hub.pushing",
    "scan": "corpus.scan",
    "score_probes": "in2.scoring",
    "select_rows": "joining.selecting",
    "tokenize": "corpus.tokenize",
    "verify": "verifying",
    "verify_in2": "in2.gate",
    "write_report": "report",
}

__all__ = [
    "Audit",
    "AuditConfig",
    "Bank",
    "BatchRules",
    "BuildConfig",
    "CaptureConfig",
    "Check",
    "Comparison",
    "EncodeConfig",
    "Estimate",
    "ExportConfig",
    "FeatureBank",
    "FeatureDataset",
    "HealConfig",
    "Hit",
    "ImportConfig",
    "In2Config",
    "ModelConfig",
    "ProbesConfig",
    "PushConfig",
    "ReportConfig",
    "RunOptions",
    "ScanConfig",
    "ScoreConfig",
    "SearchConfig",
    "Searcher",
    "SelectConfig",
    "TargetDataset",
    "TokenizeConfig",
    "TrunkConfig",
    "TrunkData",
    "audit",
    "build",
    "build_in2",
    "build_probes",
    "build_trunk",
    "capture",
    "collate_targets",
    "compare",
    "encode",
    "estimate",
    "export",
    "heal_draft",
    "import_targets",
    "import_to_deepspec",
    "merge_banks",
    "open_bank",
    "open_targets",
    "open_trunk",
    "pull",
    "push",
    "scan",
    "score_probes",
    "select_rows",
    "tokenize",
    "verify",
    "verify_in2",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'arrowbank' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"arrowbank.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
