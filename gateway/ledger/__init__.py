"""What every request used and cost, kept in a database and never in the way of a request."""
