"""A conformance suite for rules, and for anyone's Flower strategy and client."""

from .checks import Outcome
from .pairs import verify_pair
from .suite import verify_rule

__all__ = ["Outcome", "verify_pair", "verify_rule"]
