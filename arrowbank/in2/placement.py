"""One example: where its sites, needles and decoys lie, and which keys and values they hold.

Sites, keys, values and decoys' tokens come from one stream and are the same in every arm; the places of needles and decoys come
from another, which only they use. Whether a start is free is a byte: a span that lies at q takes the starts from q − span + 1 to
q + span − 1 away from the others."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from arrowbank.errors import InputError
from arrowbank.in2.arm_config import PAD_TAIL, In2Config
from arrowbank.in2.draws import FIRST_WORDS, Stream, Words, base_seed, first_below

TRIES = 400
SITE, ARM, FILLER = 7, 1000, 99
NONE = -1  # where something has no place


class Planted(NamedTuple):
    """What one example holds beside filler. Everything is empty in arm a.

    sites, needles   K starts each, the s-th needle belonging to the s-th site, sites ascending
    spans            [K, key_len + val_len], key then value, in the sites' order
    decoys           the starts of the decoys that found a place
    decoy_spans      [decoys, key_len + val_len]
    """

    sites: list[int]
    needles: list[int]
    spans: Words
    decoys: list[int]
    decoy_spans: Words


class Placement:
    """Places examples under one set of options. Made once, used for many examples."""

    def __init__(self, config: In2Config) -> None:
        self.config = config
        ratio = (1 << config.alphabet.bit_length()) / config.alphabet
        drawn = (config.triples + config.decoy_count) * config.span
        self._words = int(1.05 * ratio * drawn) + 4 * config.triples + FIRST_WORDS // 2
        self._pairing = [(n - 1, 32 - n.bit_length(), n) for n in range(config.triples, 1, -1)]
        self._decoy_bounds = [config.length - PAD_TAIL - config.span + 1] * config.decoy_count

    def filler_start(self, example: int, tokens: int) -> int:
        """Where example `example` starts in its filler of `tokens` tokens."""
        base = base_seed(self.config.seed, self.config.length, example)
        return first_below(base + FILLER, tokens - self.config.length)

    def place(self, example: int) -> Planted:
        """Everything that example `example` plants. Raises InputError where something finds no place."""
        config, span, triples = self.config, self.config.span, self.config.triples
        if config.arm == "a":
            nothing = np.empty((0, span), np.uint32)
            return Planted([], [], nothing, [], nothing)
        base = base_seed(config.seed, config.length, example)
        stream = Stream(base + SITE, self._words)
        free = _FreeStarts(config.length, span)
        sites = self._sites(stream, free, example)
        drawn = stream.many_below(config.alphabet, triples * span)  # all keys, then all values
        keys, values = drawn[: triples * config.key_len], drawn[triples * config.key_len :]
        spans = np.concatenate([keys.reshape(triples, -1), values.reshape(triples, -1)], axis=1)[self._order(stream)]
        # decoys draw tokens from one stream and places from the other, so the tokens of all can be drawn at once
        decoy_spans = stream.many_below(config.alphabet, config.decoy_count * span).reshape(-1, span)
        places = Stream(base + ARM + ord(config.arm))
        if config.arm == "b":
            planted = free.take([site - span for site in sites]) + free.draw(places, self._decoy_bounds)
        else:
            nearest = config.min_distance + span - 1
            planted = free.draw(places, [site - nearest for site in sites] + self._decoy_bounds)
        needles, decoys = planted[:triples], planted[triples:]
        if NONE in needles:
            raise InputError(
                f"example {example}: no free place for the needle of the probe at {sites[needles.index(NONE)]}; a skipped needle "
                "would make the arms differ. Give fewer --triples, a smaller --min-distance, or another --seed."
            )
        if NONE in decoys:
            decoy_spans = decoy_spans[[decoy for decoy, place in enumerate(decoys) if place != NONE]]
            decoys = [place for place in decoys if place != NONE]
        return Planted(sites, needles, spans, decoys, decoy_spans)

    def _sites(self, stream: Stream, free: _FreeStarts, example: int) -> list[int]:
        """K sites at least two spans apart, ascending, taken in `free`: arm b plants before each, and that slot must not be
        another's."""
        config, low, span = self.config, self.config.first_site, self.config.span
        n, wanted, tried = config.last_site + 1 - low, config.triples, 0
        shift, limit = 32 - n.bit_length(), TRIES * wanted
        taken, near, end = free.taken, free.near, low + len(free.near)
        here = low + free.margin  # a site less than two spans away is here, or takes the start a span before or after
        before, after = here - span, here + span
        sites: list[int] = []
        while tried < limit:
            values = stream.peek(2 * wanted, shift)
            for used, value in enumerate(values, 1):  # noqa: B007  (read after the loop)
                if value < n and not (taken[value + here] or taken[value + before] or taken[value + after]):
                    taken[value + low : value + end] = near
                    sites.append(value + low)
                    if len(sites) == wanted:
                        break
            stream.skip(used)
            if len(sites) == wanted and not tried:  # of so few draws none is one too many
                return sorted(sites)
            tried += sum(value < n for value in values[:used])
            if len(sites) == wanted and tried <= limit:
                return sorted(sites)
        raise InputError(
            f"example {example}: {limit:,} draws gave fewer than {wanted} sites that are {2 * span} tokens apart. Give fewer "
            "--triples, shorter keys and values, or a larger --length."
        )

    def _order(self, stream: Stream) -> npt.NDArray[np.intp]:
        """Which key and value each site gets: Fisher–Yates from the end."""
        count = 2 * self.config.triples
        while True:
            words, order = stream.peek(count), list(range(self.config.triples))
            left, used = enumerate(words, 1), 0
            for last, shift, n in self._pairing:
                for used, word in left:  # noqa: B007
                    j = word >> shift
                    if j < n:
                        break
                else:
                    break
                order[last], order[j] = order[j], order[last]
            else:
                stream.skip(used)
                return np.array(order, np.intp)
            count *= 2  # there were too few words: begin again


class _FreeStarts:
    """Which starts in [0, length) are still free for a span: start q is byte q + `margin` of `taken`. A span that lies at q
    sets the bytes from q on, which are `near`."""

    def __init__(self, length: int, span: int) -> None:
        self.margin = span - 1
        self.near = bytearray(b"\1" * (2 * span - 1))  # as bytes it would be copied at each use
        self.taken = bytearray(length + 2 * span)

    def take(self, starts: list[int]) -> list[int]:
        """Take each of `starts`; NONE for one that is not free."""
        return [start if self._free(start) else NONE for start in starts]

    def _free(self, start: int) -> bool:
        if self.taken[start + self.margin]:
            return False
        self.taken[start : start + len(self.near)] = self.near
        return True

    def draw(self, places: Stream, bounds: list[int]) -> list[int]:
        """For each of `bounds` the first free one of up to 400 draws below it, which is then taken; NONE where none is."""
        taken, margin, width, near = self.taken, self.margin, len(self.near), self.near
        starts: list[int] = []
        while len(starts) < len(bounds):
            # of so few words no bound can use up its tries; one that comes to their end begins again, counted
            words = enumerate(places.peek(min(TRIES, 2 * (len(bounds) - len(starts)))), 1)
            begin = 0
            for n in bounds[len(starts) :]:
                shift = 32 - n.bit_length()
                for at, word in words:
                    value = word >> shift
                    if value < n and not taken[value + margin]:
                        taken[value : value + width] = near
                        starts.append(value)
                        begin = at
                        break
                else:
                    break
            places.skip(begin)
            if len(starts) < len(bounds):
                starts.append(self._draw_one(places, bounds[len(starts)]))
        return starts

    def _draw_one(self, places: Stream, n: int) -> int:
        for _ in range(TRIES):
            if self._free(start := places.below(n)):
                return start
        return NONE


Ids = npt.NDArray[Any]
MIXER = 0x9E3779B97F4A7C15


class KeyCounter:
    """Counts under one vocabulary and key length; made once, used for many examples."""

    def __init__(self, vocab: int, key_len: int) -> None:
        self._wanted = np.zeros(vocab, bool)
        self._offsets = np.arange(key_len)
        powers = [pow(MIXER, j + 1, 1 << 64) for j in range(key_len)]
        self._powers = np.array(powers, np.uint64)

    def count(self, ids: Ids, keys: Ids, starts: Ids) -> tuple[int, int]:
        """Of the keys planted in one example: how many it holds a second time, and how often one stands where none was planted.

        ids [T]; keys [n, key_len], every needle's and decoy's; starts: every start at which a key was planted.
        """
        codes = self._codes(keys)
        distinct = np.unique(codes)
        self._wanted[keys[:, 0]] = True
        begins = ids[: len(ids) - len(self._offsets) + 1]
        places = np.flatnonzero(self._wanted.take(begins, mode="clip"))  # an id past the vocabulary is another check's
        self._wanted[keys[:, 0]] = False
        found = places[np.isin(self._codes(ids[places[:, None] + self._offsets]), distinct)]
        return len(codes) - len(distinct), len(found) - int(np.isin(found, starts).sum())

    def _codes(self, sequences: Ids) -> npt.NDArray[np.uint64]:
        """A 64-bit number a sequence: different sequences share one with a chance of 2^-64."""
        codes: npt.NDArray[np.uint64] = (sequences.astype(np.uint64) + np.uint64(1)) @ self._powers
        return codes
