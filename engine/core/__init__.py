"""The core loop and its process: the only place that knows both scheduler and runner."""
