"""The cluster fixtures of the integration tests, for tests that kill what they find there."""

from integration.conftest import cluster, engine, gpu_engine, service_folders

__all__ = ["cluster", "engine", "gpu_engine", "service_folders"]
