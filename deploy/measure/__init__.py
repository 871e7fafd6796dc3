"""Measures how much a pair of models gains on given prompts, without a service. Imports torch."""

from deploy.measure.prediction import Timing
from deploy.measure.recording import MeasuredModel, Recording
from deploy.measure.report import lines, results
from deploy.measure.survey import Plan, Survey, survey

__all__ = ["MeasuredModel", "Plan", "Recording", "Survey", "Timing", "lines", "results", "survey"]
