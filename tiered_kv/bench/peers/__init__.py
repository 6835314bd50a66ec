"""What `tiered-kv bench engine` needs to run other caches beside ours. Not used by the service."""
