"""What every service stands on: settings, servers, channels, streams, errors. It knows no service."""
