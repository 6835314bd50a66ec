"""vLLM keeps its KV here: a connector, loaded by module path or by its name.

`vllm.general_plugins` calls `register` in every process of an engine, after which
`kv_connector="TieredKVConnector"` is enough. Importing this module imports nothing of vLLM.
"""

NAME = "TieredKVConnector"
MODULE = "tiered_kv.integrations.vllm.connector"


def register() -> None:
    """Make the connector known to vLLM by its name. Idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
