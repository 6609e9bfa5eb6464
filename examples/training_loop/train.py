"""A training loop that uses whatever generation workers there are: `python -m examples.training_loop.train --help`.

At each step boundary it looks at the pool's ACTIVE workers. New ones are used from the next step on; one that dies in a
step does not fail the step, since the router continues its generations elsewhere.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from examples.training_loop.membership import Change, Member, Membership
from springtide.client import Springtide, Started, Tokens
from springtide.errors import SpringtideError
from springtide.v1 import types_pb2 as t


@dataclass(frozen=True, slots=True)
class Sample:
    """One generation: who gave it, what it said, how long it took (s). `error`: it failed, and the step goes on."""

    actor: int | None
    text: str = ""
    duration_s: float = 0.0
    error: str = ""


class Loop:
    """`learn`: texts -> loss. `say`: takes a line of the report."""

    def __init__(
        self,
        client: Springtide,
        pool: str,
        learn: Callable[[Sequence[str]], float],
        say: Callable[[str], None],
        *,
        samples_per_actor: int = 2,
        max_tokens: int = 48,
    ) -> None:
        self._client, self._pool, self._learn, self._say = client, pool, learn, say
        self._samples_per_actor, self._max_tokens = samples_per_actor, max_tokens
        self.membership = Membership()

    def run(self, steps: int, pause_s: float) -> int:
        """Steps that were trained. A step without any worker waits for one."""
        self._banner()
        trained = 0
        for step in range(1, steps + 1):
            self._report(self.membership.at_step(self._listed()), first=trained == 0)
            if not self.membership.actors:
                self._say("⏳ No worker yet: the next step waits for one")
            else:
                self._step(step)
                trained += 1
            if step < steps:
                time.sleep(pause_s)
        self._say(f"🏁 Training finished: {trained} steps, {len(self.membership.actors)} actors")
        return trained

    def _listed(self) -> list[Member]:
        """ACTIVE workers. While the control plane is away the last set stays: routers serve on as well."""
        try:
            workers = self._client.workers(pool=self._pool)
        except SpringtideError as error:
            self._say(f"⚠️  Membership unknown, the last one stays: {error}")
            return list(self.membership.actors)
        return [
            Member(w.worker_id, w.incarnation, w.node_id, len(w.gpu_ids))
            for w in workers
            if w.state == t.WORKER_STATE_ACTIVE
        ]

    def _step(self, step: int) -> None:
        actors = len(self.membership.actors)
        self._say(f"\n🚀 Running training step {step} on {actors} actors...")
        with ThreadPoolExecutor(min(64, actors * self._samples_per_actor)) as pool:
            prompts = [f"step {step} sample {n}:" for n in range(actors * self._samples_per_actor)]
            samples = list(pool.map(self._generate, prompts))
        by_actor: dict[int, list[Sample]] = {}
        for sample in samples:
            if sample.error:
                self._say(f"⚠️  A sample of step {step} failed and is left out: {sample.error}")
            elif sample.actor is not None:
                by_actor.setdefault(sample.actor, []).append(sample)
        losses = {actor: self._learn([s.text for s in by_actor[actor]]) for actor in sorted(by_actor)}
        durations = [sample.duration_s for sample in samples if not sample.error]
        self._say(f"📊 Step {step} completed:")
        self._say(f"   - {len(losses)} actors trained")
        if durations:
            self._say(f"   - Average duration: {sum(durations) / len(durations):.3f}s")
        for actor, loss in losses.items():
            self._say(f"   - Actor {actor}: training: loss={loss:.4f}")

    def _generate(self, prompt: str) -> Sample:
        began = time.monotonic()
        parts: list[str] = []
        actor: int | None = None
        try:
            for event in self._client.generate(
                self._pool, prompt, max_tokens=self._max_tokens, temperature=0.0, ignore_eos=True
            ):
                if isinstance(event, Started):
                    actor = self.membership.actor_of(event.worker_id, event.incarnation)
                elif isinstance(event, Tokens):
                    parts.append(event.text)
        except SpringtideError as error:
            return Sample(None, error=str(error))
        return Sample(actor, "".join(parts), time.monotonic() - began)

    def _banner(self) -> None:
        self._say("🎯 DYNAMIC TRAINING LOOP STARTED")
        self._say("=" * 60)
        self._say("💡 Each step runs on all ACTIVE workers of the pool; new ones join at the next step.")
        self._say(f"🔄 To add workers: springtide scale {self._pool} N")
        self._say("=" * 60)

    def _report(self, change: Change, first: bool) -> None:
        for member in change.left:
            self._say(f"💤 Worker gone: {_short(member)}")
        for member in change.joined:
            if not first:
                self._say(f"\n🆕 Detected new worker: {_short(member)} with {float(member.gpus)} GPUs")
            actor = self.membership.actors[member]
            self._say(f"🎭 Spawned training actor {actor} on node {member.node_id[:10]}...")


def _short(member: Member) -> str:
    return f"{member.worker_id[:10]}..."


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when at least one step was trained, 1 when none was."""
    parser = argparse.ArgumentParser(prog="examples.training_loop.train", description="Train on the workers of a pool.")
    parser.add_argument("--pool", default="demo", help="pool that generates (default: demo)")
    parser.add_argument("--controlplane", help="host:port; default: SPRINGTIDE_ADDRESS, else the local one")
    parser.add_argument("--router", help="host:port of the router's gRPC front; default: the local one")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--pause-s", type=float, default=2.0, help="pause between steps, seconds")
    parser.add_argument("--samples", type=int, default=2, help="generations for each actor and step")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    try:
        from examples.training_loop.learner import Learner
    except ImportError as error:
        print(
            f"the loop trains with PyTorch, which is not here: {error}. Install it: pip install torch", file=sys.stderr
        )
        return 2

    def say(line: str) -> None:
        print(line, flush=True)

    with Springtide(given.controlplane, given.router) as client:
        loop = Loop(
            client,
            given.pool,
            Learner(given.seed).step,
            say,
            samples_per_actor=given.samples,
            max_tokens=given.max_tokens,
        )
        return 0 if loop.run(given.steps, given.pause_s) else 1


if __name__ == "__main__":
    sys.exit(main())
