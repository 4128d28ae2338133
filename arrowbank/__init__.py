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
    from arrowbank.bank import Bank, FeatureBank, open_bank
    from arrowbank.bank.checks import Check
    from arrowbank.bank.kinds.token_features_bank import TokenFeatureBank
    from arrowbank.bank.kinds.trunk_bank import TrunkBank
    from arrowbank.bank.torch_rows import collate_targets
    from arrowbank.combine.merge import merge
    from arrowbank.combine.select import SelectConfig, select
    from arrowbank.engine.plan import BatchRules
    from arrowbank.engine.stage import Estimate, RunOptions
    from arrowbank.features.audit import Audit, AuditConfig, audit
    from arrowbank.features.compare import Comparison, compare
    from arrowbank.features.encode import encode, estimate_encode
    from arrowbank.features.encode_config import EncodeConfig
    from arrowbank.features.pipeline import BuildConfig, build
    from arrowbank.features.scan import ScanConfig, estimate_scan, scan
    from arrowbank.features.search import Hit, SearchConfig, Searcher
    from arrowbank.features.tokenize import TokenizeConfig, estimate_tokenize, tokenize
    from arrowbank.formats.registry import ExportConfig, export
    from arrowbank.in2.arm import build_in2, estimate_in2
    from arrowbank.in2.arm_config import In2Config
    from arrowbank.in2.probes import ProbesConfig, build_probes, estimate_probes
    from arrowbank.in2.score import ScoreConfig, score_probes
    from arrowbank.in2.verify_arms import verify_in2
    from arrowbank.models import ModelConfig
    from arrowbank.models.vllm_engine import EngineConfig
    from arrowbank.mtp.heal import estimate_heal, heal_draft
    from arrowbank.mtp.heal_config import HealConfig
    from arrowbank.mtp.trunk_build import build_trunk, estimate_trunk
    from arrowbank.mtp.trunk_plan import TrunkConfig, TrunkData
    from arrowbank.report import ReportConfig, write_report
    from arrowbank.report.verify_folder import verify
    from arrowbank.share.pull import pull
    from arrowbank.share.push import PushConfig, push
    from arrowbank.targets.capture import CaptureConfig, capture, estimate_capture
    from arrowbank.targets.check_model import verify_targets
    from arrowbank.targets.importer import ImportConfig, estimate_import, import_targets, import_to_deepspec

_HOME = {
    "Audit": "features.audit",
    "AuditConfig": "features.audit",
    "Bank": "bank",
    "BatchRules": "engine.plan",
    "BuildConfig": "features.pipeline",
    "CaptureConfig": "targets.capture",
    "Check": "bank.checks",
    "Comparison": "features.compare",
    "EncodeConfig": "features.encode_config",
    "EngineConfig": "models.vllm_engine",
    "Estimate": "engine.stage",
    "ExportConfig": "formats.registry",
    "FeatureBank": "bank",
    "HealConfig": "mtp.heal_config",
    "Hit": "features.search",
    "ImportConfig": "targets.importer",
    "In2Config": "in2.arm_config",
    "ModelConfig": "models",
    "ProbesConfig": "in2.probes",
    "PushConfig": "share.push",
    "ReportConfig": "report",
    "RunOptions": "engine.stage",
    "ScanConfig": "features.scan",
    "ScoreConfig": "in2.score",
    "SearchConfig": "features.search",
    "Searcher": "features.search",
    "SelectConfig": "combine.select",
    "TargetBank": "bank.kinds.targets_bank",
    "TokenFeatureBank": "bank.kinds.token_features_bank",
    "TokenizeConfig": "features.tokenize",
    "TrunkBank": "bank.kinds.trunk_bank",
    "TrunkConfig": "mtp.trunk_plan",
    "TrunkData": "mtp.trunk_plan",
    "audit": "features.audit",
    "build": "features.pipeline",
    "build_in2": "in2.arm",
    "build_probes": "in2.probes",
    "build_trunk": "mtp.trunk_build",
    "capture": "targets.capture",
    "collate_targets": "bank.torch_rows",
    "compare": "features.compare",
    "encode": "features.encode",
    "estimate_capture": "targets.capture",
    "estimate_encode": "features.encode",
    "estimate_heal": "mtp.heal",
    "estimate_import": "targets.importer",
    "estimate_in2": "in2.arm",
    "estimate_probes": "in2.probes",
    "estimate_scan": "features.scan",
    "estimate_tokenize": "features.tokenize",
    "estimate_trunk": "mtp.trunk_build",
    "export": "formats.registry",
    "heal_draft": "mtp.heal",
    "import_targets": "targets.importer",
    "import_to_deepspec": "targets.importer",
    "merge": "combine.merge",
    "open_bank": "bank",
    "pull": "share.pull",
    "push": "share.push",
    "scan": "features.scan",
    "score_probes": "in2.score",
    "select": "combine.select",
    "tokenize": "features.tokenize",
    "verify": "report.verify_folder",
    "verify_in2": "in2.verify_arms",
    "verify_targets": "targets.check_model",
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
    "EngineConfig",
    "Estimate",
    "ExportConfig",
    "FeatureBank",
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
    "TargetBank",
    "TokenFeatureBank",
    "TokenizeConfig",
    "TrunkBank",
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
    "estimate_capture",
    "estimate_encode",
    "estimate_heal",
    "estimate_import",
    "estimate_in2",
    "estimate_probes",
    "estimate_scan",
    "estimate_tokenize",
    "estimate_trunk",
    "export",
    "heal_draft",
    "import_targets",
    "import_to_deepspec",
    "merge",
    "open_bank",
    "pull",
    "push",
    "scan",
    "score_probes",
    "select",
    "tokenize",
    "verify",
    "verify_in2",
    "verify_targets",
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
