"""How much of attention an answer's forgotten keys would have had."""
