"""The format: what lies on disk, how it gets there, how it is opened and proved. See FORMAT.md."""

from arrowbank.bank.kinds.features_bank import FeatureBank
from arrowbank.bank.manifest import Receipt
from arrowbank.bank.open import open_bank
from arrowbank.bank.reader import Bank
from arrowbank.bank.writer import BankWriter, ShardWriter

__all__ = ["Bank", "BankWriter", "FeatureBank", "Receipt", "ShardWriter", "open_bank"]
