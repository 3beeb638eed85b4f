"""Looking inside a model: what holds of it and, where something does not, why."""

from heedful.insight.report import CheckResult, Report
from heedful.insight.verify import verify

__all__ = ["CheckResult", "Report", "verify"]
