"""Routes about jobs: submit, plan, list, show, wait, logs, events, and what can be done to them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from thebes import store as db
from thebes.api import answers
from thebes.api.access import Asker
from thebes.api.base import Api, StrictRoute, faults, parse, reply, takes
from thebes.api.events import After, EventLimit, Latest, events_page
from thebes.api.gate import asker_of, read_body
from thebes.jobspec.spec import JOB_ID, NAME, JobSpec
from thebes.live.errors import Conflict, Invalid, NotFound, Unavailable
from thebes.protocol.contract import Refused
from thebes.store.arrays import count_states, first_of, light_members, telling_member

MAX_KEY = 200
MAX_WAIT_S = 60.0
MAX_LOG_BYTES = 4 << 20
LOOK_AGAIN_S = (0.1, 1.0)  # pauses before a look at a log that may have grown: the first, and the longest

JobPath = Annotated[str, Path(pattern=JOB_ID, description="As in 17, or 17_3 for a member of array 17.")]
_KEY_HEADER = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "Names this submission: a repeat with the same key and job answers with the first one's ids.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY, "pattern": "^[!-~]+$"},
}
_LOG_HEADERS = {
    "X-Thebes-Offset": "Where to go on reading.",
    "X-Thebes-Incarnation": "Whose log this is; 0: it was never started.",
    "X-Thebes-Done": "1: nothing more will come from this incarnation.",
    "X-Thebes-Final": "1: nor from a later one, the job has ended.",
}


def job_routes(api: Api) -> APIRouter:
    """Everything under /v1/jobs."""
    router = APIRouter(tags=["jobs"], route_class=StrictRoute)

    @router.post(
        "/v1/jobs",
        status_code=201,
        response_model=answers.SubmittedAnswer,
        responses=faults(400, 403, 404, 409, 413, 503),
        openapi_extra=takes(JobSpec, headers=[_KEY_HEADER]),
        operation_id="submit",
    )
    async def submit(request: Request) -> Response:
        """Queue a job. When the answer comes, it is safely stored."""
        asker = asker_of(request)
        key = _client_key(request)
        spec = parse(JobSpec, await read_body(request, api.limits.body_bytes), what="a job")
        ids = await api.controller.submit(spec, asker.principal, client_key=key)
        # Ids are digits and underscores, so they need no JSON writer.
        listed = '","'.join(ids)
        body = f'{{"id":"{ids[0].partition("_")[0]}","ids":["{listed}"]}}'
        return Response(body, 201, media_type="application/json")

    @router.post(
        "/v1/jobs/plan",
        response_model=answers.PlanAnswer,
        responses=faults(400, 403, 404, 413, 503),
        openapi_extra=takes(JobSpec),
        operation_id="plan",
    )
    async def plan(request: Request) -> Response:
        """Tell where and when a job would start, and which jobs it would preempt. Nothing is submitted."""
        asker = asker_of(request)
        spec = parse(JobSpec, await read_body(request, api.limits.body_bytes), what="a job")
        api.rate.take(f"plan {asker.key}", api.limits.plans_per_s, time.monotonic())
        return reply(answers.PlanAnswer(**await api.controller.plan(spec, asker.principal)))

    @router.get("/v1/jobs", response_model=answers.JobPage, responses=faults(), operation_id="list_jobs")
    async def list_jobs(
        request: Request,
        state: Annotated[list[answers.JobState], Query(max_length=20)] = [],  # noqa: B006 - FastAPI copies it
        user: Annotated[str | None, Query(max_length=200)] = None,
        tenant: Annotated[str | None, Query(max_length=200)] = None,
        name: Annotated[str | None, Query(pattern=NAME)] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 50,
        cursor: Annotated[str | None, Query(pattern="^[0-9]{1,18}$", description="`next` of the page before.")] = None,
        oldest: Annotated[bool, Query(description="Oldest first.")] = False,
    ) -> Response:
        """Jobs that you may see, newest first."""
        viewer = asker_of(request).viewer

        def page(c: Connection) -> tuple[list[db.JobRow], str | None]:
            return db.list_jobs(
                c,
                viewer=viewer,
                states=state or None,
                user=user,
                tenant=tenant,
                name=name,
                limit=limit,
                cursor=cursor,
                oldest_first=oldest,
            )

        rows, following = await api.read(page)
        return reply(
            answers.JobPage(jobs=[answers.job(row, api.controller.live(row.id)) for row in rows], next=following)
        )

    @router.get(
        "/v1/jobs/{job_id}",
        response_model=answers.JobDetail | answers.ArrayDetail,
        responses=faults(404),
        operation_id="show_job",
    )
    async def show_job(request: Request, job_id: JobPath) -> Response:
        """Everything about a job with its attempts, or about an array with its members."""
        asker = asker_of(request)

        def look(c: Connection) -> Callable[[], answers.JobDetail | answers.ArrayDetail]:
            row = _seen(c, asker, job_id)
            if row.id != job_id:
                shown = answers.array_detail(job_id, row, light_members(c, job_id))
                return lambda: shown
            attempts, after = db.attempts_of(c, job_id), db.dependencies_of(c, job_id)
            return lambda: answers.job_detail(row, attempts, after, api.controller.live(job_id))

        return reply((await api.read(look))())  # what is live is asked in the event loop, where it changes

    @router.get(
        "/v1/jobs/{job_id}/events",
        response_model=answers.EventsAnswer,
        responses=faults(404),
        operation_id="job_events",
    )
    async def job_events(
        request: Request,
        job_id: JobPath,
        after: After = 0,
        limit: EventLimit = 1000,
        latest: Latest = False,
    ) -> Response:
        """Events of a job or an array, oldest first."""
        asker = asker_of(request)

        def events(c: Connection) -> answers.EventsAnswer:
            _seen(c, asker, job_id)
            return events_page(c, asker.viewer, job_id, after, limit, latest)

        return reply(await api.read(events))

    @router.get("/v1/jobs/{job_id}/wait", response_model=answers.WaitAnswer, responses=faults(404), operation_id="wait")
    async def wait(
        request: Request, job_id: JobPath, timeout_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 30.0
    ) -> Response:
        """Answer when the job, or all of the array, has ended, or else after `timeout_s`."""
        asker = asker_of(request)
        until_s = time.monotonic() + timeout_s
        with (
            api.places.one(asker.key, "waiting requests", api.limits.long_polls_per_token),
            api.bulletin.watch(job_id) as bell,
        ):
            while True:
                bell.clear()
                stands = await api.read(lambda c: _how_it_stands(c, asker, job_id))
                left_s = until_s - time.monotonic()
                if stands.done or left_s <= 0 or api.closing.is_set():
                    return reply(stands)
                await api.bulletin.wait(bell, left_s)
                if sum(stands.states.values()) > 50:
                    await asyncio.sleep(min(0.2, left_s))  # events of a large array come in crowds

    @router.get(
        "/v1/jobs/{job_id}/logs",
        response_class=Response,
        responses={
            200: {
                "description": "A piece of the log as it was written.",
                "content": {"text/plain": {"schema": {"type": "string", "format": "binary"}}},
                "headers": {
                    name: {"description": text, "schema": {"type": "string"}} for name, text in _LOG_HEADERS.items()
                },
            },
            **faults(404, 409, 503),
        },
        operation_id="logs",
    )
    async def logs(
        request: Request,
        job_id: JobPath,
        rank: Annotated[int, Query(ge=0, le=100_000)] = 0,
        incarnation: Annotated[int | None, Query(ge=1, le=1 << 31, description="Default: the last one.")] = None,
        offset: Annotated[
            int, Query(ge=-(1 << 50), le=1 << 50, description="Negative: so many bytes before the end.")
        ] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_LOG_BYTES)] = 1 << 20,
        wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Wait so long for something new.")] = 0.0,
    ) -> Response:
        """The output of one rank from `offset` on."""
        asker = asker_of(request)
        reader = _LogReader(api, asker, job_id, rank, incarnation)
        if wait_s == 0:
            return await reader.piece(offset, limit)
        with (
            api.places.one(asker.key, "waiting requests", api.limits.long_polls_per_token),
            api.bulletin.watch(job_id) as bell,
        ):
            return await reader.piece_when_there(offset, limit, wait_s, bell)

    @router.get(
        "/v1/jobs/{job_id}/environment",
        response_model=answers.EnvironmentAnswer,
        responses=faults(403, 404),
        operation_id="environment",
    )
    async def environment(request: Request, job_id: JobPath) -> Response:
        """The environment as submitted, for the owner and admins."""
        asker = asker_of(request)
        row = await api.read(lambda c: _owned(c, asker, job_id))
        return reply(answers.EnvironmentAnswer(env=JobSpec.model_validate_json(row.spec).env))

    async def act(request: Request, verb: str, job_id: str, options: dict[str, Any]) -> Response:
        asker = asker_of(request)
        await api.read(lambda c: _owned(c, asker, job_id))
        ids = await api.controller.act(verb, job_id, asker.principal, **options)
        return reply(answers.Acted(ids=ids))

    def plain_verb(verb: str, telling: str) -> None:
        @router.post(
            f"/v1/jobs/{{job_id}}/{verb}",
            response_model=answers.Acted,
            responses=faults(400, 403, 404, 409, 413, 503),
            openapi_extra=takes(answers.NothingIn, required=False),
            operation_id=verb,
            description=telling,
        )
        async def act_plainly(request: Request, job_id: JobPath) -> Response:
            await api.body(request, answers.NothingIn)
            return await act(request, verb, job_id, {})

    plain_verb("cancel", "End a job. Of an array: all members that have not ended.")
    plain_verb("hold", "Keep a waiting job from starting.")
    plain_verb("release", "Let a held job start again.")
    plain_verb("requeue", "Queue an ended job once more; stop a running one and queue it again.")

    @router.post(
        "/v1/jobs/{job_id}/preempt",
        response_model=answers.Acted,
        responses=faults(400, 403, 404, 409, 413, 503),
        openapi_extra=takes(answers.PreemptIn, required=False),
        operation_id="preempt",
    )
    async def preempt(request: Request, job_id: JobPath) -> Response:
        """Preempt a running job by hand: it gets its notice and is queued again."""
        options = await api.body(request, answers.PreemptIn)
        return await act(request, "preempt", job_id, options.model_dump(exclude_none=True))

    return router


def _client_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not (0 < len(key) <= MAX_KEY and key.isascii() and key.isprintable() and " " not in key):
        raise Invalid(f"Idempotency-Key: 1 to {MAX_KEY} visible characters", hint="a random UUID does it")
    return key


def _seen(c: Connection, asker: Asker, job_id: str) -> db.JobRow:
    """The job of this id, or the first member of the array; NotFound unless the asker may see it."""
    row = first_of(c, job_id)
    asker.must_see(row, job_id)
    assert row is not None
    return row


def _owned(c: Connection, asker: Asker, job_id: str) -> db.JobRow:
    row = first_of(c, job_id)
    asker.must_own(row, job_id)
    assert row is not None
    return row


def _how_it_stands(c: Connection, asker: Asker, job_id: str) -> answers.WaitAnswer:
    row = _seen(c, asker, job_id)
    if row.id == job_id:
        return answers.waited(job_id, row, {row.state: 1})
    return answers.waited(job_id, telling_member(c, job_id), count_states(c, job_id))


class _LogReader:
    """It reads one rank's log of one incarnation, and knows when nothing more can come."""

    def __init__(self, api: Api, asker: Asker, job_id: str, rank: int, incarnation: int | None) -> None:
        self.api = api
        self.asker = asker
        self.job_id = job_id
        self.rank = rank
        self.incarnation = incarnation

    async def piece(self, offset: int, limit: int) -> Response:
        return _log_response(*await self._look(offset, limit))

    async def piece_when_there(self, offset: int, limit: int, wait_s: float, bell: asyncio.Event) -> Response:
        until_s = time.monotonic() + wait_s
        pause_s, longest_s = LOOK_AGAIN_S
        while True:
            bell.clear()
            data, following, incarnation, done, final = await self._look(offset, limit)
            left_s = until_s - time.monotonic()
            if data or done or left_s <= 0 or self.api.closing.is_set():
                return _log_response(data, following, incarnation, done, final)
            offset = following
            # The job writes to a file and tells nobody, so we look now and then, and at once when its state changes.
            await self.api.bulletin.wait(bell, min(left_s, pause_s))
            pause_s = min(longest_s, pause_s * 1.5)

    async def _look(self, offset: int, limit: int) -> tuple[bytes, int, int, bool, bool]:
        """Data, next offset, incarnation, done, final. The state is read before the log, so the end is not missed."""
        job, attempt = await self.api.read(self._state)
        incarnation = self.incarnation or job.incarnation
        last = job.terminal and incarnation >= job.incarnation
        if incarnation == 0 or incarnation > job.incarnation:
            return b"", max(0, offset), incarnation, job.terminal, job.terminal
        try:
            read_log = self.api.controller.engine.read_log
            data, following = await read_log(self.job_id, incarnation, self.rank, offset, limit)
        except Refused as error:
            raise NotFound(str(error)) from None
        except FileNotFoundError:
            if attempt is not None and attempt.started_s is not None:
                raise NotFound(
                    f"job {self.job_id} has no log of rank {self.rank} (incarnation {incarnation})",
                    hint="ranks are numbered from 0; one per GPU unless the job says otherwise",
                ) from None
            data, following = b"", max(0, offset)
        except (OSError, TimeoutError) as error:
            raise Unavailable(f"the log of job {self.job_id} cannot be read now: {error}", hint="try again") from None
        ended = job.terminal or (attempt is not None and attempt.ended_s is not None)
        done = ended and not data
        return data, following, incarnation, done, done and last

    def _state(self, c: Connection) -> tuple[db.JobRow, db.AttemptRow | None]:
        job = _seen(c, self.asker, self.job_id)
        if job.id != self.job_id:
            raise Conflict(f"{self.job_id} is an array: each member has its own log", hint=f"as in {job.id}")
        return job, db.get_attempt(c, job.id, self.incarnation or job.incarnation)


def _log_response(data: bytes, offset: int, incarnation: int, done: bool, final: bool) -> Response:
    headers = {
        "x-thebes-offset": str(offset),
        "x-thebes-incarnation": str(incarnation),
        "x-thebes-done": "1" if done else "0",
        "x-thebes-final": "1" if final else "0",
    }
    return Response(data, 200, headers, media_type="text/plain; charset=utf-8")
