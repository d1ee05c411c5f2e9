"""The records that say what is asked: pure data that verbs and engines both import."""
