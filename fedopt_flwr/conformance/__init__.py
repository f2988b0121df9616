"""A conformance suite for rules, and for anyone's Flower strategy and client."""

from .pairs import verify_pair
from .suite import Outcome, verify_rule

__all__ = ["Outcome", "verify_pair", "verify_rule"]
