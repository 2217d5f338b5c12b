"""Drafters: whatever proposes tokens for the target to check. One file per drafter, one small protocol."""

from forerun.draft.lookup import Lookup
from forerun.draft.protocol import Draft, Drafter, Want

__all__ = ["Draft", "Drafter", "Lookup", "Want"]
