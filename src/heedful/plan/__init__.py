"""The cost of a run before it begins."""

from heedful.plan.planner import Plan, PlanOptions, make_plan

__all__ = ["Plan", "PlanOptions", "make_plan"]
