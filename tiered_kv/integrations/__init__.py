"""Engines that keep their KV here. Each module needs its engine installed and imports it."""
