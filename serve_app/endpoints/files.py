"""Endpoints of OpenAI's /v1/files: files are streamed to and from the file store."""

from __future__ import annotations

import uuid

from starlette.requests import Request
from starlette.responses import Response

from replicas.clock import Clock
from serve_app.auth import Authenticator
from serve_app.endpoints.batch_objects import file_object, list_object
from serve_app.errors import body_too_large
from serve_app.http.bodies import BodyReader
from serve_app.http.byte_stream import ByteStream
from serve_app.http.exchange import content_length, exchange_of
from serve_app.http.responses import Routes, json_response
from serve_app.http.upload import FORM_BYTES, Upload, boundary_of
from serve_app.jobs.access import JobsAccess, checked_file_id
from serve_app.jobs.api.records import FileRecord, PageRequest
from serve_app.openai.request.job_schema import FileListQuery, UploadForm
from serve_app.openai.request.parsing import parse_body

BATCH_FILE_KEPT_S = 30 * 86_400.0
"""Default lifetime of a batch's input file, seconds, as in OpenAI's API; other files are kept without limit."""


class FileEndpoints:
    """Endpoints that upload, list, show, download and delete files; a tenant sees only its own files."""

    def __init__(self, authenticator: Authenticator, bodies: BodyReader, jobs: JobsAccess, clock: Clock) -> None:
        self._authenticator = authenticator
        self._bodies = bodies
        self._jobs = jobs
        self._clock = clock

    def routes(self) -> Routes:
        """Return the handlers by method and path."""
        return {
            "POST /v1/files": self.upload,
            "GET /v1/files": self.files,
            "GET /v1/files/{file_id}": self.file,
            "DELETE /v1/files/{file_id}": self.delete,
            "GET /v1/files/{file_id}/content": self.content,
        }

    async def upload(self, request: Request) -> Response:
        """Answer POST /v1/files: stream a file into the store and record it."""
        tenant = self._tenant(request)
        boundary = boundary_of(request.headers.get("content-type"))
        max_file_bytes = self._jobs.settings.max_file_bytes
        if content_length(request.headers) > max_file_bytes + FORM_BYTES:
            raise body_too_large(max_file_bytes, "the file")
        upload = Upload(self._bodies.stream(request), boundary, max_file_bytes)
        filename = await upload.open_file()
        file_id = f"file-{uuid.uuid4().hex}"
        try:
            num_bytes = await self._jobs.files.write(file_id, upload.content())
            # The fields of the form, such as the purpose, may follow the file.
            form = parse_body(UploadForm, await upload.fields(), {})
            record = self._record(file_id, tenant, filename, num_bytes, form)
            await self._jobs.service.add_file(record)
        except BaseException:
            await self._jobs.files.delete(file_id)
            raise
        exchange_of(request).details |= {"file_id": file_id, "tenant": tenant}
        return json_response(file_object(record))

    async def files(self, request: Request) -> Response:
        """Answer GET /v1/files."""
        tenant = self._tenant(request)
        query = parse_body(FileListQuery, request.query_params, {})
        part = PageRequest(query.limit, query.after, is_ascending=query.order == "asc")
        page = await self._jobs.service.files(tenant, query.purpose, part)
        return json_response(list_object([file_object(file) for file in page.items], page.has_more))

    async def file(self, request: Request) -> Response:
        """Answer GET /v1/files/{id}."""
        return json_response(file_object(await self._file(request)))

    async def delete(self, request: Request) -> Response:
        """Answer DELETE /v1/files/{id}."""
        tenant, file_id = self._tenant(request), checked_file_id(request.path_params["file_id"])
        await self._jobs.service.delete_file(tenant, file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        """Answer GET /v1/files/{id}/content."""
        file = await self._file(request)
        headers = {"content-length": str(file.num_bytes), "x-content-type-options": "nosniff"}
        parts = self._jobs.files.read(file.id)
        return ByteStream(parts, exchange_of(request), "application/octet-stream", headers)

    async def _file(self, request: Request) -> FileRecord:
        tenant, file_id = self._tenant(request), checked_file_id(request.path_params["file_id"])
        return await self._jobs.service.file(tenant, file_id)

    def _tenant(self, request: Request) -> str:
        return self._authenticator.authenticate(request.headers).tenant

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
