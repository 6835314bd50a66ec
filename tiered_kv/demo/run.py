"""The demo: a real model holds many more conversations than its HBM budget, and forgets none."""

import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tiered_kv.client import Client
from tiered_kv.config import Config
from tiered_kv.demo import engine, model
from tiered_kv.demo.documents import Document, documents
from tiered_kv.errors import TierBroken
from tiered_kv.integrations.transformers import layout_of, resume, save
from tiered_kv.layout import KVLayout
from tiered_kv.settings import load
from tiered_kv.sizes import Size
from tiered_kv.types import Medium

BLOCK_TOKENS = 128
ANSWER_TOKENS = 24
IN_HBM, IN_DRAM = 3, 4
"""Sessions that each budget is cut to; the others sleep on NVMe."""

Say = Callable[[str], None]
Step = Callable[[str, int, int], None]
"""What is being done, steps done, steps in all."""


@dataclass
class Chat:
    """One conversation and what the uninterrupted one said."""

    name: str
    document: Document
    ids: list[int] = field(default_factory=list)
    second_ids: list[int] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)
    recompute_s: float = 0.0
    wake_s: float = 0.0
    tier: str = ""
    identical: bool = False
    first: engine.Answer | None = None


@dataclass
class Report:
    """What the demo found; `as_json` is what `--json` writes."""

    chats: list[Chat]
    hbm_only: int
    blocks_moved: dict[str, int]
    bytes_moved: dict[str, int]
    checks_failed: int
    out_of_memory: int
    wall_s: float
    tokens: int

    def as_json(self) -> dict[str, Any]:
        """Times in milliseconds, sizes in bytes."""
        wakes: dict[str, list[float]] = defaultdict(list)
        for chat in self.chats:
            wakes[chat.tier].append(chat.wake_s)
        return {
            "sessions": len(self.chats),
            "hbm_only_sessions": self.hbm_only,
            "identical": sum(chat.identical for chat in self.chats),
            "out_of_memory": self.out_of_memory,
            "checks_failed": self.checks_failed,
            "wake_ms": {t: _spread(v) | {"count": len(v)} for t, v in sorted(wakes.items())},
            "recompute_ms": _spread([chat.recompute_s for chat in self.chats]),
            "blocks_moved": self.blocks_moved,
            "bytes_moved": self.bytes_moved,
            "tokens": self.tokens,
            "wall_s": round(self.wall_s, 1),
        }


def run(
    sessions: int, connect: Callable[[Config], Client], say: Say, step: Step,
    budget_tokens: int = 900,
) -> Report:  # fmt: skip
    """Hold `sessions` chats, wake each for a second question, compare with never having slept.

    `connect` starts the service on the given budgets. Cleans up its files however it ends.
    """
    began = time.perf_counter()
    step("loading the model", 0, 1)
    chat_model = model.load()
    layout = layout_of(chat_model.model, block_tokens=BLOCK_TOKENS)
    chats = [
        Chat(f"chat-{i:02d}", document)
        for i, document in enumerate(documents(chat_model.tokenizer, sessions, budget_tokens))
    ]
    for chat in chats:
        chat.ids = engine.first_turn(chat_model, chat.document.text, chat.document.first_question)
    blocks = max(len(chat.ids) + ANSWER_TOKENS for chat in chats) // BLOCK_TOKENS + 1
    folder = Path(tempfile.mkdtemp(prefix="demo-", dir=_cache_folder()))
    config = budgets(layout, blocks, sessions, folder)
    say(_intro(layout, config, sessions, blocks))
    try:
        with connect(config) as kv:
            _first_questions(kv, chat_model, layout, chats, step)
            _second_questions(kv, chat_model, layout, chats, say, step)
            return _report(kv, chats, config, layout, blocks, time.perf_counter() - began)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def budgets(layout: KVLayout, blocks: int, sessions: int, folder: Path) -> Config:
    """HBM for about 3 sessions of `blocks` blocks, DRAM for about 4 more, NVMe for all."""
    base = load()
    size = layout.block_bytes

    def slots(n: float, watermark: float) -> Size:  # room for n when the tier is at its low mark
        return Size(-(-int(n * blocks / watermark) // 4) * 4 * size)

    return replace(
        base,
        hbm=replace(base.hbm, bytes=slots(IN_HBM, base.hbm.low), slab_bytes=Size(4 * size),
                    verify=1.0),
        dram=replace(base.dram, bytes=slots(IN_DRAM, base.dram.low), slab_bytes=Size(4 * size)),
        nvme=replace(base.nvme, bytes=slots(sessions * 1.5, base.nvme.low), folder=str(folder),
                     slab_bytes=Size(4 * size), devices=()),
        service=replace(base.service, namespace="tiered_kv_demo"),
    )  # fmt: skip


def _first_questions(
    kv: Client, chat_model: model.ChatModel, layout: KVLayout, chats: Sequence[Chat], step: Step
) -> None:
    """Ask each session's first question, save it, and let it go on uninterrupted for comparison."""
    for i, chat in enumerate(chats):
        step(f"{chat.name}: reads {chat.document.name!r} and answers", i, len(chats))
        answer = engine.prefill_and_answer(chat_model, chat.ids, None, ANSWER_TOKENS)
        chat.first = answer
        saved = save(kv, chat.name, layout, [*chat.ids, *answer.tokens], answer.cache)
        if saved.why:
            raise TierBroken(f"{chat.name} could not be saved: {saved.why}")
        chat.second_ids = engine.next_turn(
            chat_model, chat.ids, answer, chat.document.second_question
        )
        # The save has copied: the live cache may go on, as if there were no end of HBM.
        chat.expected = engine.prefill_and_answer(
            chat_model, chat.second_ids, answer.cache, ANSWER_TOKENS
        ).tokens
        chat.first = answer._replace(cache=None)  # type: ignore[arg-type]


def _second_questions(
    kv: Client, chat_model: model.ChatModel, layout: KVLayout, chats: Sequence[Chat],
    say: Say, step: Step,
) -> None:  # fmt: skip
    """Wake every session, newest first so that each tier is met, and ask again.

    Beside each wake, in the same minute on the same machine, the prompt is computed anew.
    """
    for i, chat in enumerate(reversed(chats)):
        step(f"{chat.name}: wakes and answers again", i, len(chats))
        began = time.perf_counter()
        resumed = resume(kv, chat.name, layout, chat_model.model)
        chat.wake_s = time.perf_counter() - began
        chat.tier = _slowest(resumed.woken.found)
        answer = engine.prefill_and_answer(
            chat_model, chat.second_ids, resumed.cache, ANSWER_TOKENS
        )
        chat.identical = answer.tokens == chat.expected
        save(kv, chat.name, layout, [*chat.second_ids, *answer.tokens], answer.cache)
        again = engine.prefill_and_answer(chat_model, chat.second_ids, None, 1)
        chat.recompute_s = again.first_token_s
        say(
            f"{chat.name}  {len(chat.second_ids):5d} tokens  woken from {chat.tier:<7} in "
            f"{chat.wake_s * 1e3:6.1f} ms   computed anew in {chat.recompute_s * 1e3:6.0f} ms   "
            f"{'identical' if chat.identical else 'DIFFERENT'}   "
            f"{engine.text_of(chat_model, answer)[:48]!r}"
        )


def _report(
    kv: Client, chats: list[Chat], config: Config, layout: KVLayout, blocks: int, wall_s: float
) -> Report:
    blocks_moved: dict[str, int] = defaultdict(int)
    moved: dict[str, int] = defaultdict(int)
    failed = oom = 0
    for status in kv.nodes():
        for leg in status["moves"]:
            blocks_moved[f"{leg['from']}-{leg['to']}"] += leg["blocks"]
            moved[f"{leg['from']}-{leg['to']}"] += leg["bytes"]
        counts = status["counts"]
        failed += sum(n for event, n in counts.items() if event == "failed.corrupt")
        oom += sum(n for why, n in status["misses"].items() if why in ("full", "too_large"))
    capacity = int(config.hbm.bytes * config.hbm.high) // layout.block_bytes
    return Report(
        chats, capacity // blocks, dict(blocks_moved), dict(moved), failed, oom, wall_s,
        sum(len(chat.second_ids) for chat in chats),
    )  # fmt: skip


def _intro(layout: KVLayout, config: Config, sessions: int, blocks: int) -> str:
    where = "CPU stand-in" if not torch.cuda.is_available() else "GPU"
    return (
        f"{sessions} chats of about {blocks * BLOCK_TOKENS} tokens, "
        f"{blocks * layout.block_bytes / 2**20:.0f} MiB of KV each\n"
        f"budgets: HBM ({where}) {config.hbm.bytes}, DRAM {config.dram.bytes}, "
        f"NVMe {config.nvme.bytes}"
    )


def _slowest(found: Sequence[Medium]) -> str:
    order = list(Medium)
    return str(max(found, key=order.index)) if found else "nowhere"


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {
        "p50": round(1e3 * ordered[round(last * 0.5)], 2),
        "p99": round(1e3 * ordered[round(last * 0.99)], 2),
    }


def _cache_folder() -> Path:
    folder = model.default_folder().parent
    folder.mkdir(parents=True, exist_ok=True)
    return folder
