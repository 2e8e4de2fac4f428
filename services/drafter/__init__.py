"""Training of heads that draft for a model: `millrace train-drafter`."""
