"""Receipts: records of what determined an output, made at its end and compared later."""

from deploy.receipts.comparison import Outcome, Verdict, compare
from deploy.receipts.making import ReceiptMaker, fingerprint, outrider_version, receipt_fields

__all__ = ["Outcome", "ReceiptMaker", "Verdict", "compare", "fingerprint", "outrider_version", "receipt_fields"]
