"""How users' files are read: images, videos, tables, tars and streams. Files that look wrong are refused."""
