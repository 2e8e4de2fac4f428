"""The front process: gRPC towards the gateways, a socket towards the core."""
