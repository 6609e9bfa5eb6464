"""Control plane, node agent and router of `springtide up` as one: started in order, kept up, stopped without a rest."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator

import click

from springtide.cli import text
from springtide.cli.exits import Exit
from springtide.cli.shape import name_of
from springtide.cli.up import banner, configs, leftovers
from springtide.cli.up.child import Child
from springtide.cli.up.options import UpPlan, check_ports
from springtide.cli.up.screen import Screen
from springtide.cli.views import event_row, state_of
from springtide.client.asynchronous import AsyncSpringtide
from springtide.errors import SpringtideError
from springtide.v1.types_pb2 import Pool

LISTEN_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 45.0  # after it, what is left is killed
POLL_S = 0.25


class Stack:
    """One run. `serve` runs until cancelled; `stop` ends everything; `force` makes a stop immediate."""

    def __init__(self, plan: UpPlan, screen: Screen) -> None:
        self.plan = plan
        self.screen = screen
        self.data_dir = plan.options.data_dir
        self.forced = asyncio.Event()
        self.ports = configs.Ports.asked(plan.options)
        self._newest_event: int | None = None
        folder = self.data_dir
        self._children = {
            name: Child(
                name,
                module,
                config=folder / "config" / f"{module}.toml",
                discovery=folder / module / f"{module}.json",
                log_path=folder / "logs" / f"{module}.log",
                cwd=folder,
            )
            for name, module in (("control plane", "controlplane"), ("node agent", "nodeagent"), ("router", "router"))
        }

    # ------------------------------------------------------------ up

    async def serve(self) -> None:
        """Starts everything, then keeps it up. Raises SpringtideError when the start fails."""
        began = time.monotonic()
        o = self.plan.options
        self.screen.say(f"Springtide: pool {o.pool}, engine {o.engine}, data in {self.data_dir}")
        check_ports(o)
        await self._start("control plane")
        async with asyncio.TaskGroup() as group:
            group.create_task(self._start("node agent"))
            group.create_task(self._start("router"))
        async with asyncio.TaskGroup() as group:
            for child in self._children.values():
                group.create_task(child.keep(self._note, LISTEN_TIMEOUT_S))
            group.create_task(self._serve_pool(began))

    async def _start(self, name: str) -> None:
        child = self._children[name]
        began = time.monotonic()
        self._write_configs()
        await child.start()
        found = await child.listening(LISTEN_TIMEOUT_S)
        self.ports = self.ports.bound(child.name, found)
        self._write_configs()  # a restart takes the ports that the others know
        where = "  ".join(f"{key} {found[key]}" for key in ("grpc", "http", "metrics", "node_id") if found.get(key))
        self.screen.say(f"  {name:<14} up after {time.monotonic() - began:.1f} s  {where}")

    def _write_configs(self) -> None:
        for module, content in configs.all_of(self.plan, self.ports).items():
            path = self.data_dir / "config" / f"{module}.toml"
            partial = path.with_suffix(".tmp")
            partial.touch(mode=0o600)
            partial.write_text(content)
            partial.replace(path)  # whole or not at all: another process may be reading it

    async def _serve_pool(self, began: float) -> None:
        async with AsyncSpringtide(self.ports.controlplane_address, self.ports.router_address) as client:
            await self._apply(client)
            await self._wait_for_worker(client)
            for line in banner.lines(self.plan, self.ports, time.monotonic() - began):
                self.screen.say(line)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_events(client))
                group.create_task(self._follow_counts(client))

    async def _apply(self, client: AsyncSpringtide) -> None:
        _, created = await client.apply(self.plan.pool_spec())
        o = self.plan.options
        bounds = f"{o.min_workers} to {self.plan.max_workers} workers"
        self.screen.say(f"  pool {o.pool:<9} {'created' if created else 'kept from an earlier run'}: {bounds}")
        others = [pool.spec.name for pool in await client.pools() if pool.spec.name != o.pool]
        if others:
            self._note(f"pools of an earlier run come up too: {', '.join(others)} (`springtide delete` takes one away)")

    async def _wait_for_worker(self, client: AsyncSpringtide) -> None:
        """Says how the first workers come up, until the router has one to route to."""
        if self.plan.options.min_workers == 0:
            self._note("min is 0: the first request starts a worker")
            return
        pool, began = self.plan.options.pool, time.monotonic()
        shown: dict[str, str] = {}
        conditions: tuple[str, ...] = ()
        while True:
            try:
                workers, status = await client.workers(pool=pool), (await client.pool(pool)).status
                routable = sum(model.active_workers for model in await client.models() if model.pool == pool)
            except SpringtideError as error:  # a process that is being started again
                self.screen.live(f"  {error.message}")
                await asyncio.sleep(POLL_S)
                continue
            for worker in workers:
                line = "  ".join(filter(None, (state_of(worker), worker.message)))
                if line != shown.get(worker.worker_id):
                    shown[worker.worker_id] = line
                    self.screen.say(f"  {worker.worker_id:<14} {text.coloured(line)}")
                    if name_of(worker, "phase") == "FAILED":
                        self.screen.say(f"  {'':<14} its log: {worker.log_path}")
            if tuple(status.conditions) != conditions:
                conditions = tuple(status.conditions)
                for condition in conditions:
                    self.screen.say(f"  pool {pool:<9} {click.style(condition, fg='red')}")
            if routable:
                self.screen.live("")
                return
            self.screen.live(f"  waiting for the first worker, {text.duration(time.monotonic() - began)}")
            await asyncio.sleep(POLL_S)

    async def _follow_events(self, client: AsyncSpringtide) -> None:
        while True:
            try:
                if self._newest_event is None:
                    self._newest_event = max((event.event_id for event in await client.events(limit=1)), default=0)
                async for event in client.watch_events(after_event_id=self._newest_event):
                    self._newest_event = event.event_id
                    self.screen.say("  ".join(text.coloured(cell) for cell in event_row(event) if cell))
            except SpringtideError:  # the control plane is being started again
                pass
            await asyncio.sleep(1.0)

    async def _follow_counts(self, client: AsyncSpringtide) -> None:
        while True:
            try:
                self.screen.live("   ".join(_counts(pool) for pool in await client.pools()))
            except SpringtideError as error:
                self.screen.live(f"({error.message})")
            await asyncio.sleep(1.0)

    # ------------------------------------------------------------ down

    async def stop(self) -> Exit:
        """Routers refuse, workers finish and end, then the control plane; says what is left, which is nothing."""
        self.screen.live("")
        for child in self._children.values():
            child.stopping = True
        if any(child.alive for child in self._children.values()):
            self.screen.say("Stopping: running requests finish, then the engines end. Ctrl-C again kills them.")
        deadline = asyncio.get_running_loop().time() + STOP_TIMEOUT_S
        async with self._last_events():
            await self._end([self._children["router"], self._children["node agent"]], deadline)
        await self._end([self._children["control plane"]], deadline)
        clean = await self._nothing_left()
        if clean:
            self.screen.say("Stopped; no process is left.")
        return Exit.OK if clean else Exit.REFUSED

    @contextlib.asynccontextmanager
    async def _last_events(self) -> AsyncIterator[None]:
        """Shows what happens to the workers while the stack ends."""
        if self._newest_event is None or not self._children["control plane"].alive:
            yield
            return
        async with AsyncSpringtide(self.ports.controlplane_address) as client:
            following = asyncio.create_task(self._follow_events(client))
            try:
                yield
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    async def _end(self, children: list[Child], deadline: float) -> None:
        """SIGTERM, and SIGKILL when it is forced or the time is over."""
        for child in children:
            child.signal(signal.SIGTERM)
        waits = [asyncio.ensure_future(child.wait()) for child in children if child.alive]
        force = asyncio.ensure_future(self.forced.wait())
        loop = asyncio.get_running_loop()
        while waits and not self.forced.is_set() and loop.time() < deadline:
            done, _ = await asyncio.wait([*waits, force], timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
            waits = [wait for wait in waits if wait not in done]
            names = [child.name for child in children if child.alive]
            self.screen.live(f"  waiting for {' and '.join(names)}" if names else "")
        force.cancel()
        self.screen.live("")
        for child in children:
            if child.alive:
                how = "as told" if self.forced.is_set() else f"it did not end within {STOP_TIMEOUT_S:.0f} s"
                self.screen.say(f"  killing the {child.name}: {how}")
                child.signal(signal.SIGKILL)
                await child.wait()

    async def _nothing_left(self) -> bool:
        """Looks for shims and engines that outlived their agent, kills and names them."""
        marks = leftovers.markers(self.data_dir / "nodeagent")
        found = leftovers.left(marks)
        for pid, command in found:
            self.screen.say(f"  killing process {pid}: {command[:100]}")
        remaining = await asyncio.to_thread(leftovers.kill, marks)
        for pid, command in remaining:
            self.screen.say(f"  process {pid} does not end: {command[:100]}")
        return not remaining

    # ------------------------------------------------------------ inside

    def _note(self, line: str) -> None:
        self.screen.say(click.style(f"  {line}", fg="yellow"))


def _counts(pool: Pool) -> str:
    status = pool.status
    known = [f"{status.active} active"]
    moving = ((status.starting, "starting"), (status.draining, "draining"))
    known += [f"{count} {word}" for count, word in moving if count]
    for field in ("in_flight", "waiting"):
        shown = text.number(getattr(status, field)) if status.HasField(field) else text.UNKNOWN
        known.append(f"{shown} {field.replace('_', '-')}")
    return f"{pool.spec.name}: {', '.join(known)}"
