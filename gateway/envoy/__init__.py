"""Envoy's configuration, from the same tables as everything else: one for laptop, compose, Kubernetes."""
