"""The example's deployment is one that Serve and Ray Serve LLM take, and the line in it works."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.llm._internal.serve.engines.vllm.vllm_models import VLLMEngineConfig
from ray.serve.config import RequestRouterConfig
from ray.serve.llm import LLMConfig
from ray.serve.schema import ServeDeploySchema

from tiered_kv.integrations.ray_serve import SessionRouter, TieredKVServer, enable
from tiered_kv.integrations.vllm import NAME

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def document() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((EXAMPLES / "serve_llm.yaml").read_text())
    return found


def config_of(document: dict[str, Any]) -> LLMConfig:
    return LLMConfig.model_validate(document["applications"][0]["args"]["llm_configs"][0])


def test_serve_takes_the_file(document: dict[str, Any]):
    [application] = ServeDeploySchema.model_validate(document).applications
    assert application.import_path == "ray.serve.llm:build_openai_app"


def test_the_line_names_the_server_and_turns_everything_on(document: dict[str, Any]):
    config = config_of(document)
    assert config.server_cls is TieredKVServer
    before = VLLMEngineConfig.from_llm_config(config)
    assert "kv_transfer_config" not in before.engine_kwargs
    enable(config)
    after = VLLMEngineConfig.from_llm_config(config)
    assert after.engine_kwargs["kv_transfer_config"]["kv_connector"] == NAME
    router = RequestRouterConfig(**config.deployment_config["request_router_config"])
    assert router.get_request_router_class() is SessionRouter


def test_an_engine_configuration_that_exists_already_is_changed_too(document: dict[str, Any]):
    config = config_of(document)
    engine = config.get_engine_config()
    enable(config)
    assert engine.engine_kwargs["kv_transfer_config"]["kv_connector"] == NAME


def test_the_example_can_be_imported_without_starting_anything():
    module = runpy.run_path(str(EXAMPLES / "serve_llm.py"))
    messages = module["opening"](1, 50)
    assert len(messages[0]["content"].split()) > 50
    assert module["opening"](1, 50) != module["opening"](2, 50)
