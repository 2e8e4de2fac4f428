"""What stands beside our gateway in its benchmark: a back end of known speed."""
