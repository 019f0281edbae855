"""Every limit that the page's server enforces, each with its reason."""

from __future__ import annotations

from quantwm import video

PROTOCOL_VERSION = 1
"""Version of the messages between the page and the server; a page of another version is told
to reload."""

# Visitors ------------------------------------------------------------------------------------
MAX_SESSIONS = 64
"""Pages open at once. Each owns one slot of the control board (4 KiB) and nothing else until it
drives, so this bounds bookkeeping, not memory."""

MAX_QUEUE = 16
"""Visitors waiting for the one world. At 5 minutes a turn the last waits over an hour; more would
be a promise nobody keeps."""

TURN_SECONDS_WHEN_WANTED = 300.0
"""Longest turn while somebody else waits. Alone, a person may stay as long as they like."""

ZERO_GPU_SECONDS = 120
"""Longest turn on a lent GPU: a visitor without an account has two minutes a day."""

IDLE_SECONDS_WHEN_WANTED = 60.0
"""A paused world is given to the next visitor after this."""

IDLE_SECONDS = 1800.0
"""A world that nobody touches is released after half an hour even when nobody waits."""

VANISHED_SECONDS = 150.0
"""No sign of life from the page for this long ends its turn when somebody waits. Browsers slow the
timers of hidden tabs to one a minute, so it must be well above 60 s; a closed tab is noticed within
a second."""

# Driving -------------------------------------------------------------------------------------
DEAD_MAN_SECONDS = 2.0
"""Keys older than this count as released: four missed heartbeats of 500 ms."""

BLOCKS_IN_FLIGHT = 2
"""Blocks sent but not yet drawn. Gradio has no back-pressure: an unthrottled generator was seen
to queue 1.75 s of pictures."""

ACK_PATIENCE_SECONDS = 2.0
"""A block that is never acknowledged (a dropped message) holds the loop no longer than this."""

IDLE_POLL_SECONDS = 0.01
"""How often a paused loop looks for a new control: below one display frame."""

MAX_CHUNKS = 4_000
"""Chunks of one run; the frame numbers stay far below 16 bits and a forgotten page ends."""

MAX_STAGES = 8
"""Loading stages that are shown; the largest world has seven."""

MAX_STEPS_BEHIND = 4
"""Single steps that may be asked for ahead; more presses than that are dropped."""

MAX_PORT = 65_535
"""Of TCP."""

# Numbers and pictures from outside -----------------------------------------------------------
MAX_SEED = 2**31 - 1
"""Seeds are signed 32-bit, so that they mean the same on every platform."""

MAX_DENOISING_STEPS = 32
"""Flow matching gains nothing beyond; the time grows linearly."""

MAX_LANES = 4
"""Panels that still fit side by side."""

MAX_PROMPT_CHARACTERS = 4_000
"""Twice what any encoder reads (512 tokens); UMT5's own check has the same number."""

MAX_SPEED = 8.0
"""Times natural speed; 0 means as fast as it goes."""

MAX_KEYS_HELD = 6
"""More fingers than anyone drives with."""

MAX_UPLOAD_BYTES = 16 * 2**20
"""A start picture; also handed to Gradio as max_file_size."""

MAX_PICTURE_PIXELS = video.MAX_PICTURE_PIXELS
"""Checked from the header before decoding."""

MIN_PICTURE_SIDE, MAX_PICTURE_ASPECT = video.MIN_PICTURE_SIDE, video.MAX_PICTURE_ASPECT
"""Of a start picture, as on the command line."""

MAX_PICTURE_SIDE = 1024
"""Pictures are reduced to this before a world sees them; every world works below it."""

MAX_PICTURES = 32
"""Start pictures kept per page: 32 x 3 MB."""

# Files ---------------------------------------------------------------------------------------
MAX_RECORDING_BYTES = 512 * 2**20
"""Raw picture bytes of one recording; at 128x96 and three lanes about 80 minutes of driving."""

MIN_FREE_DISK_BYTES = 256 * 2**20
"""Recording stops when the disk has less than this."""

DOWNLOAD_SECONDS = 3600.0
"""How long a session's archive can be fetched; it also goes when the page is closed."""

FLUSH_SECONDS = 30.0
"""How long a download waits for the driving loop to close the recording."""

# Wire ----------------------------------------------------------------------------------------
LOSSLESS_PIXELS = 320 * 240
"""Frames up to this size travel as PNG, so that what is judged is what was made; larger ones as
JPEG 4:4:4, whose coding noise is below one level on average but would hide slight flicker."""

JPEG_QUALITY = 92
"""0.5 to 2 ms a frame at 640x352 to 1280x704."""
