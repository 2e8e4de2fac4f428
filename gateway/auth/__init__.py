"""Authentication: API keys and JWT claims to tenant, tier and a signed context, asked by the edge."""
