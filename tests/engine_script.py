"""An engine in processes of its own: one JSON job on stdin, its answers as JSON on the last line.

A job has `model`, `args` of the engine, `kv` (its kv_transfer_config or null) and `prompts`. Each
prompt is answered by itself, the engine's own cache emptied before: `tokens` and `cached` of each.
"""

import json
import os
import sys
import time

SCRIPT = f"""
import sys
sys.path.insert(0, {__file__.rpartition("/")[0]!r})
import engine_script
if __name__ == "__main__":
    engine_script.main()
"""


def main() -> None:
    job = json.loads(sys.stdin.read())
    os.environ.update(job.get("env", {}))
    from engine_kit import engine, prepare_environment

    prepare_environment()
    with engine(job["model"], job["kv"], **job["args"]) as llm:
        time.sleep(job.get("join_s", 0.0))
        answers = [ask(llm, text, job["max_tokens"]) for text in job["prompts"]]
        time.sleep(job.get("save_s", 0.0))
    print("\n" + json.dumps(answers), flush=True)


def ask(llm, text, max_tokens):
    from vllm import SamplingParams

    end = time.monotonic() + 60
    while not llm.reset_prefix_cache():
        assert time.monotonic() < end
        time.sleep(0.05)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    [done] = llm.generate([{"prompt_token_ids": text}], params, use_tqdm=False)
    return {"tokens": list(done.outputs[0].token_ids), "cached": done.num_cached_tokens}
