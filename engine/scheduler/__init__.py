"""Decides what every step computes. No torch, no grpc, no clock: time is an argument."""

from engine.scheduler.scheduler import Scheduler
from engine.types import SchedulerLoad

__all__ = ["Scheduler", "SchedulerLoad"]
