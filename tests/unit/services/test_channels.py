"""Options of gRPC's channels."""

from __future__ import annotations

import grpc

from services.channels import MEASURED_RELEASES


def test_the_event_engine_was_measured_on_this_release_of_grpc() -> None:
    assert grpc.__version__.startswith(MEASURED_RELEASES), (
        f"services.channels turns grpcio's event engine off in {MEASURED_RELEASES}, this is "
        f"{grpc.__version__}: "
        "run benchmarks.gateway_turns with and without GRPC_EXPERIMENTS, and extend the list or delete it"
    )
