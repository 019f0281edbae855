"""Procedural maps: rooms on a grid, written as UDMF text inside a PWAD that the engine loads.

Every map has its own textures, lights, doorways, pillars and decorations, so that what lies behind
the player can only be known from what was seen before. Everything in a map stands still: no
animated textures and no moving doors, because flicker of their own would be blamed on a cache.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field

import numpy as np

# Freedoom textures picked by eye from contact sheets: mutually distinct after the reduction, and
# plain enough. In rooms of one texture each, the first autoencoder (31 dB in all) reached 33 to
# 41 dB on these walls and 36 to 41 dB on these floors; ten others at 26 to 32 dB are gone.
WALLS = (
    "STWALL", "SHAWN2", "COMPBLUE", "A-CAMO1", "REDWALL", "STARG1", "WOOD6", "STONE2", "BRICK6",
    "A-CONCTE", "STARGR1", "A-TILE", "ZIMMER2", "SPACEW4",
)  # fmt: skip
FLOORS = (
    "FLOOR0_1", "FLOOR0_3", "FLAT5", "FLAT8", "FLOOR4_8", "FLOOR5_2", "GRASS1", "FLAT14",
    "FLAT5_3", "MFLR8_1", "FLAT3", "FLAT10",
)  # fmt: skip
CEILINGS = (
    "CEIL3_1", "CEIL3_5", "CEIL5_1", "FLAT1", "FLAT19", "FLAT20", "FLAT5_5", "CEIL1_1", "RROCK09",
)  # fmt: skip
DOOR_FRAMES = ("METAL", "BRONZE1", "GRAY1", "WOODMET1")
PILLARS = ("SP_HOT1", "SILVER1", "TANROCK8", "COMPBLUE", "A-CAMO1")
# Sprites with a single frame: columns, candelabrum, trees, stalagmite, techno column, floor lamp.
DECORATIONS = (30, 31, 32, 33, 35, 43, 47, 48, 54, 2028)
PLAYER_START = 1
MAX_MAPS = 99  # of a PWAD: names have two digits
PLAYER_RADIUS = 16.0
THING_RADIUS = 44.0
"""Map units from the centre of a pillar (48 wide) or a decoration at which a player is stopped."""


@dataclass(frozen=True)
class MapConfig:
    """Sizes in map units; the player is 32 wide and walks about 33 units a frame."""

    grid: int = 3
    pitch: int = 576
    room_min: int = 320
    room_max: int = 496
    door_width: int = 112
    door_height: int = 104
    extra_door_chance: float = 0.35
    pillar_chance: float = 0.35
    decoration_chance: float = 0.5


@dataclass(frozen=True)
class Room:
    """One room: its rectangle [x0, x1] x [y0, y1] and its look."""

    x0: int
    y0: int
    x1: int
    y1: int
    height: int
    light: int
    wall: str
    floor: str
    ceiling: str

    @property
    def centre(self) -> tuple[float, float]:
        return (self.x0 + self.x1) / 2, (self.y0 + self.y1) / 2


@dataclass(frozen=True)
class Door:
    """A doorway between rooms a and b; `points` lie on its axis, in a, in b (map units)."""

    a: int
    b: int
    points: tuple[tuple[float, float], tuple[float, float]]


@dataclass
class GameMap:
    """A finished map: UDMF text, and what a walker has to know.

    obstacles: centres of pillars and decorations, map units.
    """

    text: str
    rooms: list[Room]
    doors: list[Door]
    start_room: int
    obstacles: list[tuple[float, float]] = field(default_factory=list)
    neighbours: dict[int, list[Door]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for door in self.doors:
            self.neighbours.setdefault(door.a, []).append(door)
            self.neighbours.setdefault(door.b, []).append(door)


class _Udmf:
    """Collects vertices, sectors, lines and things and writes them as UDMF text."""

    def __init__(self) -> None:
        self.vertices: dict[tuple[int, int], int] = {}
        self.lines: list[str] = []
        self.sides: list[str] = []
        self.sectors: list[str] = []
        self.things: list[str] = []

    def vertex(self, point: tuple[int, int]) -> int:
        return self.vertices.setdefault(point, len(self.vertices))

    def sector(self, floor: str, ceiling: str, height: int, light: int) -> int:
        self.sectors.append(
            f'sector{{heightfloor=0;heightceiling={height};texturefloor="{floor}";'
            f'textureceiling="{ceiling}";lightlevel={light};}}'
        )
        return len(self.sectors) - 1

    def _side(self, sector: int, middle: str, top: str) -> int:
        self.sides.append(
            f'sidedef{{sector={sector};texturemiddle="{middle}";texturetop="{top}";}}'
        )
        return len(self.sides) - 1

    def wall(self, a: tuple[int, int], b: tuple[int, int], sector: int, texture: str) -> None:
        """A solid line; `sector` lies to the right of the direction a -> b."""
        side = self._side(sector, texture, "-")
        v1, v2 = self.vertex(a), self.vertex(b)
        self.lines.append(f"linedef{{v1={v1};v2={v2};sidefront={side};blocking=true;}}")

    def opening(
        self, a: tuple[int, int], b: tuple[int, int], front: int, back: int, top: str
    ) -> None:
        """A line that can be walked through; `top` shows above the lower ceiling behind it."""
        near, far = self._side(front, "-", top), self._side(back, "-", top)
        v1, v2 = self.vertex(a), self.vertex(b)
        self.lines.append(
            f"linedef{{v1={v1};v2={v2};sidefront={near};sideback={far};twosided=true;}}"
        )

    def thing(self, kind: int, x: float, y: float, angle: int = 0) -> None:
        skills = "".join(f"skill{i}=true;" for i in range(1, 6))
        self.things.append(
            f"thing{{x={x:.1f};y={y:.1f};angle={angle};type={kind};{skills}single=true;}}"
        )

    def text(self) -> str:
        points = [f"vertex{{x={x}.0;y={y}.0;}}" for x, y in self.vertices]
        parts = [*points, *self.lines, *self.sides, *self.sectors, *self.things]
        return 'namespace="zdoom";\n' + "\n".join(parts) + "\n"


def build_map(seed: int, config: MapConfig = MapConfig()) -> GameMap:
    """Builds the map of a seed; the same seed gives the same text."""
    rng = np.random.default_rng(seed)
    rooms = _place_rooms(rng, config)
    edges = _choose_doors(rng, config)
    udmf = _Udmf()
    sectors = [udmf.sector(r.floor, r.ceiling, r.height, r.light) for r in rooms]
    openings: dict[tuple[int, str], tuple[int, int, int]] = {}
    doors = [_cut_door(rng, config, udmf, rooms, edge, openings) for edge in edges]
    obstacles: list[tuple[float, float]] = []
    for index, room in enumerate(rooms):
        _draw_room(udmf, index, room, sectors[index], openings)
        obstacles += _furnish(rng, config, udmf, room, sectors[index])
    start = int(rng.integers(len(rooms)))
    x, y = rooms[start].centre
    udmf.thing(PLAYER_START, x, y, int(rng.integers(48)) * 7)
    return GameMap(udmf.text(), rooms, doors, start, obstacles)


def _place_rooms(rng: np.random.Generator, config: MapConfig) -> list[Room]:
    count = config.grid**2
    walls = rng.permutation(len(WALLS))[:count]
    floors = rng.permutation(len(FLOORS))[:count]
    rooms = []
    for index in range(count):
        width, depth = (int(v) * 16 for v in rng.integers(
            config.room_min // 16, config.room_max // 16 + 1, size=2
        ))  # fmt: skip
        cx = (index % config.grid) * config.pitch
        cy = (index // config.grid) * config.pitch
        x0, y0 = cx - width // 2, cy - depth // 2
        rooms.append(
            Room(
                x0,
                y0,
                x0 + width,
                y0 + depth,
                height=int(rng.choice((128, 144, 160, 192))),
                light=int(rng.choice((160, 192, 208, 224, 255))),
                wall=WALLS[walls[index]],
                floor=FLOORS[floors[index]],
                ceiling=str(rng.choice(CEILINGS)),
            )
        )
    return rooms


def _choose_doors(rng: np.random.Generator, config: MapConfig) -> list[tuple[int, int]]:
    """A random spanning tree of the grid, and some doors more so that loops exist."""
    grid = config.grid
    edges = [(i, i + 1) for i in range(grid**2) if i % grid < grid - 1]
    edges += [(i, i + grid) for i in range(grid * (grid - 1))]
    root = list(range(grid**2))

    def find(node: int) -> int:
        while root[node] != node:
            node = root[node]
        return node

    chosen = []
    for position in rng.permutation(len(edges)):
        a, b = edges[position]
        joins = find(a) != find(b)
        if joins or rng.random() < config.extra_door_chance:
            chosen.append((a, b))
        if joins:
            root[find(a)] = find(b)
    return chosen


def _cut_door(
    rng: np.random.Generator,
    config: MapConfig,
    udmf: _Udmf,
    rooms: list[Room],
    edge: tuple[int, int],
    openings: dict[tuple[int, str], tuple[int, int, int]],
) -> Door:
    """Adds the sector of a doorway and notes the gap it needs in the walls of both rooms."""
    a, b = edge
    sideways = b == a + 1
    ax, ay = rooms[a].centre
    middle = int(ay if sideways else ax) + int(rng.integers(-2, 3)) * 16
    low, high = middle - config.door_width // 2, middle + config.door_width // 2
    light = (rooms[a].light + rooms[b].light) // 2 - 16
    sector = udmf.sector("FLAT1", "FLAT1", config.door_height, light)
    frame = str(rng.choice(DOOR_FRAMES))
    if sideways:
        near, far = rooms[a].x1, rooms[b].x0
        udmf.wall((near, high), (far, high), sector, frame)
        udmf.wall((far, low), (near, low), sector, frame)
        openings[a, "right"] = openings[b, "left"] = (low, high, sector)
        points = ((near - 40.0, float(middle)), (far + 40.0, float(middle)))
    else:
        near, far = rooms[a].y1, rooms[b].y0
        udmf.wall((low, near), (low, far), sector, frame)
        udmf.wall((high, far), (high, near), sector, frame)
        openings[a, "top"] = openings[b, "bottom"] = (low, high, sector)
        points = ((float(middle), near - 40.0), (float(middle), far + 40.0))
    return Door(a, b, points)


def _draw_room(
    udmf: _Udmf,
    index: int,
    room: Room,
    sector: int,
    openings: dict[tuple[int, str], tuple[int, int, int]],
) -> None:
    """Walls clockwise, so that the room lies to the right of every line."""
    x0, y0, x1, y1 = room.x0, room.y0, room.x1, room.y1
    sides = {
        "left": ((x0, y0), (x0, y1)),
        "top": ((x0, y1), (x1, y1)),
        "right": ((x1, y1), (x1, y0)),
        "bottom": ((x1, y0), (x0, y0)),
    }
    for name, (start, end) in sides.items():
        gap = openings.get((index, name))
        if gap is None:
            udmf.wall(start, end, sector, room.wall)
            continue
        low, high, behind = gap
        first, second = (low, high) if name in ("left", "top") else (high, low)
        upright = name in ("left", "right")
        p = (start[0], first) if upright else (first, start[1])
        q = (start[0], second) if upright else (second, start[1])
        udmf.wall(start, p, sector, room.wall)
        udmf.opening(p, q, sector, behind, room.wall)
        udmf.wall(q, end, sector, room.wall)


def _furnish(
    rng: np.random.Generator, config: MapConfig, udmf: _Udmf, room: Room, sector: int
) -> list[tuple[float, float]]:
    """Pillars and decorations in the four quarters, clear of the lines from doors to the centre.

    Returns their centres.
    """
    placed = []
    cx, cy = (int(v) for v in room.centre)
    dx, dy = int((room.x1 - room.x0) * 0.27), int((room.y1 - room.y0) * 0.27)
    pillar = str(rng.choice(PILLARS))
    kind = int(rng.choice(DECORATIONS))
    for sx, sy in ((-1, -1), (-1, 1), (1, -1), (1, 1)):
        x, y = cx + sx * dx, cy + sy * dy
        draw = rng.random()
        if draw < config.pillar_chance / 2:
            h = 24
            corners = [(x - h, y - h), (x + h, y - h), (x + h, y + h), (x - h, y + h)]
            for i in range(4):  # counter-clockwise: the room lies outside
                udmf.wall(corners[i], corners[(i + 1) % 4], sector, pillar)
            placed.append((float(x), float(y)))
        elif draw < (config.pillar_chance + config.decoration_chance) / 2:
            udmf.thing(kind, x, y)
            placed.append((float(x), float(y)))
    return placed


def is_open(game_map: GameMap, x: float, y: float) -> bool:
    """Whether a player can stand at a point: in a room or a doorway, clear of walls and things."""
    half = MapConfig().door_width / 2 - PLAYER_RADIUS
    for room in game_map.rooms:
        inside_x = room.x0 + PLAYER_RADIUS < x < room.x1 - PLAYER_RADIUS
        if inside_x and room.y0 + PLAYER_RADIUS < y < room.y1 - PLAYER_RADIUS:
            return all(math.dist((x, y), thing) > THING_RADIUS for thing in game_map.obstacles)
    for door in game_map.doors:
        (ax, ay), (bx, by) = door.points
        if ay == by and ax <= x <= bx and abs(y - ay) < half:
            return True
        if ax == bx and ay <= y <= by and abs(x - ax) < half:
            return True
    return False


def pack_wad(maps: list[GameMap]) -> bytes:
    """A PWAD that holds the maps as MAP01, MAP02, ... (at most MAX_MAPS)."""
    if not 1 <= len(maps) <= MAX_MAPS:
        raise ValueError(f"a PWAD of this project holds 1 to {MAX_MAPS} maps, got {len(maps)}")
    lumps: list[tuple[str, bytes]] = []
    for number, game_map in enumerate(maps, start=1):
        lumps += [
            (f"MAP{number:02d}", b""),
            ("TEXTMAP", game_map.text.encode("ascii")),
            ("ENDMAP", b""),
        ]
    body, directory = b"", b""
    for name, data in lumps:
        directory += struct.pack("<ii8s", 12 + len(body), len(data), name.encode("ascii"))
        body += data
    return struct.pack("<4sii", b"PWAD", len(lumps), 12 + len(body)) + body + directory
