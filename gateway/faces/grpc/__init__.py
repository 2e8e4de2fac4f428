"""The gRPC face: millrace.inference.v1.InferenceService over the same pipeline."""
