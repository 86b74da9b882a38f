"""How somebody's files are read: pictures, videos, tables, tars, streams; what is odd in them is refused."""
