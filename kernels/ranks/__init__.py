"""What the ranks of one model do together, over memory that they share."""
