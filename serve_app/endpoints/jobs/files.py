"""Endpoints of OpenAI's /v1/files: files are streamed to and from the file store."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from replicas.errors import ServingError
from replicas.timing.clock import Clock
from serve_app.endpoints.jobs.job_objects import file_object, list_object
from serve_app.endpoints.jobs.job_requests import JobRequests
from serve_app.errors import body_too_large
from serve_app.http.bodies import FORM_BYTES, Upload, boundary_of
from serve_app.http.exchange import content_length, exchange_of, json_response, tenant_of
from serve_app.http.streaming import ByteStream
from serve_app.jobs.access import checked_file_id
from serve_app.jobs.api.errors import UnknownFile
from serve_app.jobs.api.records import FileRecord, JobsService, PageRequest, new_id
from serve_app.openai.request.job_schema import FileListQuery, UploadForm
from serve_app.openai.request.parsing import parse_body
from serve_app.reference.job_answers import DeletedFile, FileList, FileObject
from serve_app.reference.operations import BODY_FAILURES, LOOKUP_FAILURES, Created, Operation

BATCH_FILE_KEPT_S = 30 * 86_400.0
"""Default lifetime of a batch's input file, seconds, as in OpenAI's API; other files are kept without limit."""


class FileEndpoints:
    """Endpoints that upload, list, show, download and delete files; a tenant sees only its own files."""

    def __init__(self, requests: JobRequests, clock: Clock) -> None:
        self._requests = requests
        self._jobs = requests.jobs
        self._clock = clock

    @Operation(
        "POST",
        "/v1/files",
        "Files",
        FileObject,
        failures=BODY_FAILURES | {503},
        form=UploadForm,
        created=Created("/v1/files/{file_id}"),
    )
    async def upload(self, request: Request) -> Response:
        """Upload a file.

        It is streamed into the store, then recorded.
        """
        tenant = tenant_of(request)
        boundary = boundary_of(request.headers.get("content-type"))
        max_file_bytes = self._jobs.settings.max_file_bytes
        if content_length(request.headers) > max_file_bytes + FORM_BYTES:
            raise body_too_large(max_file_bytes, "the file")
        upload = Upload(self._requests.bodies.stream(request), boundary, max_file_bytes)
        filename = await upload.open_file()
        file_id = new_id("file")
        try:
            num_bytes = await self._jobs.files.write(file_id, upload.content())
            # The fields of the form, such as the purpose, may follow the file.
            form = parse_body(UploadForm, await upload.fields(), {})
        except BaseException:
            await self._jobs.files.delete(file_id)
            raise
        record = self._record(file_id, tenant, filename, num_bytes, form)
        await self._add(record)
        exchange_of(request).details |= {"file_id": file_id, "tenant": tenant}
        return json_response(file_object(record))

    @Operation("GET", "/v1/files", "Files", FileList, failures=LOOKUP_FAILURES | {400}, query=FileListQuery)
    async def files(self, request: Request) -> Response:
        """List files."""
        tenant = tenant_of(request)
        query = parse_body(FileListQuery, request.query_params, {})
        part = PageRequest(query.limit, query.after, is_ascending=query.order == "asc")
        page = await self._jobs.client.call(JobsService.files, tenant, query.purpose, part)
        return json_response(list_object([file_object(file) for file in page.items], page.has_more))

    @Operation("GET", "/v1/files/{file_id}", "Files", FileObject, failures=LOOKUP_FAILURES)
    async def file(self, request: Request) -> Response:
        """Show a file."""
        return json_response(file_object(await self._file(request)))

    @Operation("DELETE", "/v1/files/{file_id}", "Files", DeletedFile, failures=LOOKUP_FAILURES | {409})
    async def delete(self, request: Request) -> Response:
        """Delete a file."""
        tenant, file_id = tenant_of(request), checked_file_id(request.path_params["file_id"])
        await self._jobs.client.call(JobsService.delete_file, tenant, file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    @Operation(
        "GET",
        "/v1/files/{file_id}/content",
        "Files",
        other_answers={"application/octet-stream": ()},
        failures=LOOKUP_FAILURES,
    )
    async def content(self, request: Request) -> Response:
        """Download a file."""
        file = await self._file(request)
        headers = {"content-length": str(file.num_bytes), "x-content-type-options": "nosniff"}
        return ByteStream(self._jobs.files.read(file.id), exchange_of(request), "application/octet-stream", headers)

    async def _add(self, record: FileRecord) -> None:
        """Record a file whose bytes are in the store; delete the bytes if it has no record.

        A call may fail after its commit, so a look at the records follows. If that fails too, the bytes stay: a
        record must not outlive them.

        Raises:
            ServingError: the file has no record, or a look at the records has failed.
        """
        try:
            await self._jobs.client.call(JobsService.add_file, record)
        except ServingError:
            if not await self._is_recorded(record):
                await self._jobs.files.delete(record.id)
                raise

    async def _is_recorded(self, record: FileRecord) -> bool:
        try:
            await self._jobs.client.call(JobsService.file, record.tenant, record.id)
        except UnknownFile:
            return False
        return True

    async def _file(self, request: Request) -> FileRecord:
        tenant, file_id = tenant_of(request), checked_file_id(request.path_params["file_id"])
        return await self._jobs.client.call(JobsService.file, tenant, file_id)

    def _record(self, file_id: str, tenant: str, filename: str, num_bytes: int, form: UploadForm) -> FileRecord:
        now = self._clock.unix()
        kept_s = BATCH_FILE_KEPT_S if form.purpose == "batch" else None
        if form.expires_after is not None:
            kept_s = float(form.expires_after.seconds)
        return FileRecord(
            id=file_id,
            tenant=tenant,
            purpose=form.purpose,
            filename=filename,
            num_bytes=num_bytes,
            created_unix_s=now,
            expires_unix_s=None if kept_s is None else now + kept_s,
        )
