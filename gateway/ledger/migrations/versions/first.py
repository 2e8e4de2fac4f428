"""The ledger of 0.1.0, which is made whole and never by a step. Later steps begin here."""

revision = "0001"
down_revision = None
