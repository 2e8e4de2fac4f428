"""What the span of an answer says of its drafts, by who proposed them."""

from __future__ import annotations

from observability.emit.names import Attribute, attribute

# Tokens that a grammar forces, and the methods of speculation.
PROPOSERS = ("grammar", "ngram", "suffix", "draft_model", "eagle3", "medusa", "mtp", "lookahead")

DRAFTERS = attribute("millrace.drafters", "", "Who proposed drafts; absent where nobody did.")
DRAFTED_BY: dict[str, Attribute] = {
    who: attribute(f"millrace.drafted_tokens.{who}", "{token}", f"Tokens proposed by {who}.")
    for who in PROPOSERS
}
ACCEPTED_BY: dict[str, Attribute] = {
    who: attribute(f"millrace.accepted_tokens.{who}", "{token}", f"Tokens proposed by {who} that were kept.")
    for who in PROPOSERS
}
