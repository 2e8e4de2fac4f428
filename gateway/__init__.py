"""The gateway: authentication, limits, tiers, admission, routing and the public faces. See DESIGN.md."""
