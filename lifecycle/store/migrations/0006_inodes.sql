-- A chat's directory says which files it has. Rows have what a file can't say: its ID, and
-- the content types of the file with an inode and of the one that it was to replace. An
-- inode of 0 is of any file with the name.
ALTER TABLE files DROP COLUMN size;
ALTER TABLE files DROP COLUMN modified_at;
ALTER TABLE files ADD COLUMN inode INTEGER NOT NULL DEFAULT 0;
ALTER TABLE files ADD COLUMN old_type TEXT NOT NULL DEFAULT '';
ALTER TABLE files ADD COLUMN old_inode INTEGER NOT NULL DEFAULT 0;

-- What an earlier version was about to put into chats may be there already, and else stays
-- away: nobody was told that it is there. Rows without a file are dropped at start-up.
INSERT OR IGNORE INTO files (tenant, chat_id, name, file_id, created_at, content_type)
    SELECT tenant, chat_id, name, file_id, created_at, content_type FROM changes JOIN changed_files USING (change_id);
-- A chat that it was about to delete stays: its directory may be in its place still. Else the
-- chat is empty. Nobody was told that it is gone.
DROP TABLE changed_files;
DROP TABLE changes;
