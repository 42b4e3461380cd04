"""`BackupAndResume`."""
