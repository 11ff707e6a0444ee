-- Times are nanoseconds since 1970, UTC; the last three columns are JSON.
CREATE TABLE sandboxes (
    session_id   TEXT PRIMARY KEY,
    tenant       TEXT NOT NULL,
    key          TEXT NOT NULL,
    container_id TEXT NOT NULL,
    created_at   INTEGER NOT NULL,
    expires_at   INTEGER NOT NULL,
    last_used_at INTEGER NOT NULL,
    metadata     BLOB NOT NULL,
    overridden   BLOB NOT NULL,
    enforcement  BLOB NOT NULL
) WITHOUT ROWID;
