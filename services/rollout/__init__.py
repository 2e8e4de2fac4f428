"""The gate in the path: a candidate's share of an alias grows by what is shown of it, or goes."""
