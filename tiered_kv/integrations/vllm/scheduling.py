"""The scheduler's side: what to load, and who waits for whom. What is kept is in `keeping`.

Everything here runs on the engine's thread and waits for nothing; questions go through `Asking`.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tiered_kv.integrations.vllm.announcing import Announcing
from tiered_kv.integrations.vllm.asking import Answer, Asking
from tiered_kv.integrations.vllm.hints import hints
from tiered_kv.integrations.vllm.keeping import Keeping, PagesOf, Worker, session_of
from tiered_kv.integrations.vllm.link import NodeLink
from tiered_kv.integrations.vllm.metrics import Stats
from tiered_kv.integrations.vllm.names import Names
from tiered_kv.integrations.vllm.options import Options
from tiered_kv.integrations.vllm.plans import Load, Step, Told
from tiered_kv.integrations.vllm.rates import CopyRate, PrefillRate
from tiered_kv.integrations.vllm.requests import Tracked, cut, run_of, spans
from tiered_kv.types import BlockKey

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request

SHARED_WAIT_S = 10.0
"""For how long a request waits at most for another one's load or save of the same blocks; less
where computing them is known to take less."""
IDLE_WAIT_S = 0.002
"""What an engine that computes nothing waits for an answer, instead of planning an empty step. Most
answers take less, and the threads that wait for them need the interpreter."""
LEASE_USE = 0.5
"""Share of a lease after which the engine's answer is asked anew: the rest is for the copy."""
MISS_S = 1.0
"""For how long a miss is believed: the engine asks at every step until it has pages."""


class Scheduling:
    """One engine's requests. `names` is None until the workers have introduced themselves."""

    def __init__(
        self, link: NodeLink, options: Options, names: Names, page: int, beside: Worker | None,
        events: bool = False,
    ) -> None:  # fmt: skip
        """`page` is tokens of an engine page; `beside` is the only worker, if it is in this
        process. `events`: the engine publishes KV events."""
        self._link = link
        self._options = options
        self._names = names
        self._page = page
        self._group = names.group
        self._ttl_s = options.config.service.lease_ttl_s
        self._asking = Asking(link, names, self._ttl_s)
        self._announcing = Announcing(link, self._asking, page, names.group) if events else None
        self._keeping = Keeping(link, options, names, page, beside, self._asking, self._announcing)
        self._tracked: dict[str, Tracked] = {}
        self._loading: dict[BlockKey, str] = {}  # of rank 0: who is loading it
        self._loads: list[Load] = []
        self._stepped_s = 0.0
        self._idle = True  # the last step computed nothing
        self._waited = False  # in this step, for an answer
        self._computed: list[tuple[str, int, int]] = []  # prompt chunks of the last step
        self.prefill = PrefillRate()
        self.copy = CopyRate()
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)
        self._told: dict[str, float] = {}  # totals of the last `stats`

    # -- a request comes ------------------------------------------------------------------

    def arrived(self, request: "Request") -> None:
        """A request is in the queue: its session starts coming up, long before it is scheduled."""
        found = hints(request.kv_transfer_params)
        self.counts["hints.bad"] += found.bad
        self._tracked[request.request_id] = Tracked(request, found)
        if found.session is not None and self._link.up:
            for rank in range(len(self._names.layouts)):
                self._asking.hint("prefetch", session_of(found.session, rank))

    def matched(self, request: "Request", computed: int) -> tuple[int | None, bool]:
        """Tokens to load behind the `computed` ones that the engine has; None: ask again later."""
        one = self._get(request)
        one.have = computed // self._page
        pages = min(len(one.hashes), request.num_tokens // self._page)
        if one.never or not self._link.up or pages <= one.have:
            self._drop_answer(one)
            return 0, False
        if self._shared(one):  # also with an answer: two may have asked at the same moment
            self._drop_answer(one)
            return None, False
        if one.answer is not None:
            if self._fresh(one, one.answer):
                return self._loadable(one, one.answer)
            self._drop_answer(one)
        return self._asked(one)

    def allocated(self, request: "Request", pages: Sequence[int], external: int) -> None:
        """The engine has given pages for `external` tokens, or decided not to load."""
        one = self._get(request)
        answer = one.answer
        if external == 0 or answer is None:
            if not one.loading:
                self._drop_answer(one)
            return
        one.answer = None
        end = -(-(one.have * self._page + external) // self._page)
        first = one.have // self._group
        parts = spans(pages[one.have : end], one.have, self._group)
        keys = tuple(
            run_of(answer, rank)[first : first + len(parts)]
            for rank in range(len(self._names.layouts))
        )
        leases = tuple(cut(lease, first - answer.skip, len(parts)) for lease in answer.found.leases)
        start = first - answer.skip
        sums = tuple(one_rank[start : start + len(parts)] for one_rank in answer.found.checksums)
        by_layer = one.by_layer
        self._loads.append(Load(request.request_id, parts, keys, leases, sums, by_layer))
        one.loading, one.keys = not by_layer, keys[0]
        one.pages = frozenset(page for part in parts for page in part.pages)
        one.unsure = one.have * self._page + external if by_layer else 0
        if one.loading:
            self._loading.update(dict.fromkeys(keys[0], request.request_id))
        if self._announcing is not None:
            self._announcing.note(request, keys[0], first, end)
        self.counts["load.requests"] += 1
        self.counts["load.tokens"] += external

    # -- a step ---------------------------------------------------------------------------

    def step(
        self, scheduled: Mapping[str, int], preempted: Iterable[str] | None,
        pages_of: "PagesOf", now: float,
    ) -> Step:  # fmt: skip
        """What the workers shall do in this step. `scheduled` tokens a request; what was computed
        before the step is kept now."""
        self._waited = False
        gone = frozenset(preempted or ())
        for request_id in gone:
            self._preempted(request_id)
        self._measure(scheduled, now)
        for request_id in scheduled:
            one = self._tracked.get(request_id)
            if one is not None:
                self._keeping.computed(one, pages_of)
        loads, self._loads = tuple(self._loads), []
        return Step(loads, self._keeping.take(), gone)

    def heard(self, told: Told | None, received: Iterable[str], failed: Iterable[int]) -> None:
        """What the workers did since the last step."""
        broken = set(failed)
        if broken:  # one rank may tell of them long before the last one has ended its part
            for one in self._tracked.values():
                if not one.pages.isdisjoint(broken):
                    one.never, one.kept = True, 0
        for request_id in received:
            self._end_load(request_id)
            loaded = self._tracked.get(request_id)
            if loaded is not None:
                loaded.loading, loaded.pages = False, frozenset()
        if told is None:
            return
        self.copy.note(told.loaded_bytes, told.load_s)
        self.counts.update(told.counts)
        self.counts["load.bytes"] += told.loaded_bytes
        self.seconds["load.seconds"] += told.load_s
        self._keeping.stored(told.stored)

    def finished(self, request: "Request", pages: Sequence[int]) -> bool:
        """A request has ended, or was aborted: whether its pages are still needed."""
        one = self._tracked.pop(request.request_id, None)
        if one is None:
            return False
        self._drop_answer(one)
        if one.loading:  # the load goes on and reports; its pages are freed then
            return False
        return self._keeping.finished(one, pages)

    def reset(self) -> None:
        """Find nothing of what was kept so far, and keep nothing of what was computed so far."""
        self._names.renew()
        for one in self._tracked.values():
            self._drop_answer(one)
            one.kept = 0
            if one.request.num_computed_tokens:
                one.hints = replace(one.hints, store=False)

    def events(self) -> "list[KVCacheEvent]":
        """What changed in the node's tiers, for routers; nothing where nobody publishes it."""
        return [] if self._announcing is None else self._announcing.take()

    def stats(self) -> Stats:
        """What happened since the last call, and how things are now."""
        total: dict[str, float] = {**self.counts, **self.seconds, "outages": self._link.outages}
        since = {name: n - self._told.get(name, 0) for name, n in total.items()}
        self._told = total
        prefill, copy = self.prefill.prefill(), self.copy.link(len(self._names.layouts))
        now = {
            "up": float(self._link.up),
            "prefill_s_per_token": prefill.seconds(0, 1024) / 1024 if prefill else 0.0,
            "copy_bytes_per_s": copy.bytes_per_s if copy else 0.0,
        }
        return Stats.of({name: n for name, n in since.items() if n}, now)

    def close(self) -> None:
        """Let go of all that the node holds for this engine."""
        for one in self._tracked.values():
            self._drop_answer(one)
        self._asking.close()

    # -- looking up -----------------------------------------------------------------------

    def _get(self, request: "Request") -> Tracked:
        if request.request_id not in self._tracked:
            self.arrived(request)
        return self._tracked[request.request_id]

    def _asked(self, one: Tracked) -> tuple[int | None, bool]:
        """Ask, or look whether the answer is there."""
        skip = one.have // self._group
        question = one.question
        if question is not None and question.skip > skip:  # the engine has lost pages meanwhile
            self._asking.abandon(question)
            question = None
        if question is None:
            rest = one.request.num_tokens - len(one.hashes) * self._page
            tail = len(one.hashes) % self._group * self._page
            one.question = self._asking.find(
                one.hashes,
                skip,
                max(1, rest + tail),
                self.prefill.prefill(),
                self.copy.link(len(self._names.layouts)),
            )
            question = one.question
        if self._idle and not self._waited:
            self._waited = True
            question.wait(IDLE_WAIT_S)
        if not question.done:
            if time.monotonic() - question.asked_s < self._options.lookup_wait_s:
                return None, False
            self.counts["lookup.late"] += 1
            self._link.suspect(f"a lookup took over {self._options.lookup_wait_s:g} s")
            self._drop_answer(one)
            one.never = True
            return 0, False
        one.question, one.answer = None, question.answer
        if one.answer is None:
            self.counts["lookup.failed"] += 1
            one.never = True
            return 0, False
        one.kept = max(one.kept, one.answer.found.blocks)
        self._decided(one.answer)
        return self._loadable(one, one.answer)

    def _decided(self, answer: Answer) -> None:
        """Count what load-or-recompute chose, and what both ways were modelled to take."""
        decision = answer.found.decision
        self.counts["lookup.found"] += bool(answer.found.load)
        if decision is not None:
            self.counts["decided.load"] += decision.load
            self.counts["decided.recompute"] += decision.recompute
            self.seconds["decided.load_s"] += decision.seconds
            self.seconds["decided.recompute_s"] += decision.recompute_all_s

    def _loadable(self, one: Tracked, answer: Answer) -> tuple[int | None, bool]:
        """How many tokens the answer promises beyond what the engine has."""
        found = answer.found
        blocks = answer.skip + found.load
        whole = min(blocks, found.blocks)
        end = whole * self._group + (found.tail if blocks > found.blocks else 0)
        tokens = min(end * self._page, one.request.num_tokens - 1) - one.have * self._page
        if not found.load or tokens <= 0:
            self._asking.release(found.leases)
            one.answer = replace(answer, found=replace(found, load=0, leases=()))
            return 0, False
        one.by_layer = self._options.load == "layerwise" and all(
            len(lease.keys) >= found.load for lease in found.leases
        )  # what comes from below takes longer than a step
        return tokens, not one.by_layer

    def _fresh(self, one: Tracked, answer: Answer) -> bool:
        """Whether an answer still says what is asked now, and its leases last long enough."""
        age = time.monotonic() - answer.asked_s
        good_s = LEASE_USE * self._ttl_s if answer.found.load else MISS_S
        return answer.skip <= one.have // self._group and age < good_s

    def _shared(self, one: Tracked) -> bool:
        """Whether to wait: another request loads or saves the very blocks that this one needs."""
        now = time.monotonic()
        if not self._loading and not self._keeping.is_saving():
            return False
        if one.waited_s and now - one.waited_s > self._worth(one):
            return False
        block = one.have // self._group
        if len(one.hashes) < (block + 1) * self._group:
            return False
        key = self._names.block(one.hashes, block)[0]
        if key not in self._loading and not self._keeping.is_saving(key):
            one.waited_s = 0.0
            return False
        if not one.waited_s:
            self.counts["lookup.shared"] += 1
            one.waited_s = now
        return True

    def _worth(self, one: Tracked) -> float:
        """For how many seconds others are worth waiting for."""
        prefill = self.prefill.prefill()
        if prefill is None:
            return SHARED_WAIT_S
        start = one.have * self._page
        return min(SHARED_WAIT_S, prefill.seconds(start, one.request.num_tokens))

    def _drop_answer(self, one: Tracked) -> None:
        """Give back what a lookup has promised us."""
        if one.question is not None:
            self._asking.abandon(one.question)
        if one.answer is not None:
            self._asking.release(one.answer.found.leases)
        one.question = one.answer = None

    def _end_load(self, request_id: str) -> None:
        for key in [k for k, who in self._loading.items() if who == request_id]:
            del self._loading[key]

    def _preempted(self, request_id: str) -> None:
        """Its pages are gone, and saves that had not begun with them."""
        one = self._tracked.get(request_id)
        self._keeping.preempted(request_id)
        if one is not None:
            self._drop_answer(one)
            one.kept, one.unsure, one.pages = 0, 0, frozenset()

    # -- measuring ------------------------------------------------------------------------

    def _measure(self, scheduled: Mapping[str, int], now: float) -> None:
        """A step lasts from its planning to that of the next one, if some request is in both:
        the engine did not idle in between."""
        if self._computed and any(r in scheduled for r, _, _ in self._computed):
            self.prefill.note([(a, b) for _, a, b in self._computed], now - self._stepped_s)
        self._stepped_s = now
        self._idle = not scheduled
        self._computed = []
        for request_id, n in scheduled.items():
            one = self._tracked.get(request_id)
            if one is not None and n > 1:
                start = one.request.num_computed_tokens
                self._computed.append((request_id, start, start + n))
