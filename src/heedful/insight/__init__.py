"""Checks of a net: causality, padding, cached decoding, gradients and more (`verify`)."""

from heedful.insight.checks import Check
from heedful.insight.report import CheckResult, Report
from heedful.insight.verify import CHECKS, checks_of, verify

__all__ = ["CHECKS", "Check", "CheckResult", "Report", "checks_of", "verify"]
