"""Test kits for those who write their own policies, tiers or transports; and fault injection."""
