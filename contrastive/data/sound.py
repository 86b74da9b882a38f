"""Sound of a clip, as VAST's audio encoder (BEATs) reads it: a slice of a log-mel filter bank.

The filter bank is Kaldi's: windows of 25 ms every 10 ms at 16 kHz, 64 mel bands, the logarithm of
their energy. A slice is 1,024 windows (10.24 s).
"""

import functools
import io

import numpy as np
import torch

SOUND_TYPES = ("wav", "mp3", "flac", "m4a", "ogg")
RATE = 16_000  # samples a second
WINDOW = 400  # samples: 25 ms
HOP = 160  # samples: 10 ms
BANDS = 64
SLICE_LENGTH = 1024  # windows of a slice
MEAN, TWO_DEVIATIONS = 15.41663, 2 * 6.55582  # of BEATs' training


# ---- from a file to samples ----
def read_sound(source, start=None, end=None):
    """The sound of a file, or of a window of it, at 16 kHz.

    Args:
        source: path or bytes of wav, mp3, mp4, webm, ... (whatever FFmpeg reads).
        start, end: window in seconds; None = the file's own ends.
    Returns: (samples,) float32 in -1..1 of the first channel; None if the file has no sound in the
        window.
    Raises: OSError or ValueError if it cannot be read.
    """
    import av

    file = str(source)
    if isinstance(source, (bytes, bytearray)):
        file = io.BytesIO(source)
    with av.open(file) as container:
        stream = container.streams.best("audio")
        if stream is None:
            return None
        samples, first = decode_sound(container, stream, start, end)
    if samples is None:
        return None
    beginning = max(0, round(((start or 0.0) - first) * RATE))
    stop = None
    if end is not None:
        stop = max(0, round((end - first) * RATE))
    samples = samples[beginning:stop]
    if not len(samples):
        return None
    return samples


def decode_sound(container, stream, start, end):
    """Decodes a sound from at or before `start` to behind `end`, in whole packets.

    Args:
        container, stream: of PyAV.
        start, end: seconds from the beginning of the file, or None.
    Returns: (samples,) at 16 kHz, None if there are none; and the second of the first one.
    """
    import av

    resampler = av.AudioResampler(format="fltp", rate=RATE)
    # second at which the file begins, which is above 0 in a transport stream
    origin = (container.start_time or 0) / av.time_base
    first = None
    parts = []
    if start:
        container.seek(int((origin + start) * av.time_base), any_frame=False)
    for frame in container.decode(stream):
        second = (frame.time or 0.0) - origin
        if first is None:
            first = second
        if end is not None and second > end:
            break
        parts += [part.to_ndarray()[0] for part in resampler.resample(frame)]
    if not parts:
        return None, first
    parts += [part.to_ndarray()[0] for part in resampler.resample(None)]
    return np.concatenate(parts), first


@functools.lru_cache(maxsize=2**16)
def has_sound(path):
    """Whether a file has a sound track; False if it cannot be opened."""
    import av

    try:
        with av.open(path) as container:
            return len(container.streams.audio) > 0
    except (OSError, ValueError):
        return False


# ---- from samples to a slice ----
@functools.lru_cache
def mel_filters():
    """The window (400,) and the mel bands (257, 64) of Kaldi's filter bank."""
    from transformers import audio_utils

    window = audio_utils.window_function(WINDOW, "povey", periodic=False)
    bands = audio_utils.mel_filter_bank(
        num_frequency_bins=257, num_mel_filters=BANDS, min_frequency=20.0, max_frequency=RATE / 2,
        sampling_rate=RATE, norm=None, mel_scale="kaldi", triangularize_in_mel_space=True)
    return window, bands


def filter_bank(samples):
    """Kaldi's log-mel filter bank of samples (n,) in -1..1: (windows, 64), float32; only whole
    windows count."""
    from transformers import audio_utils

    if len(samples) < WINDOW:
        return np.zeros((0, BANDS), np.float32)
    window, bands = mel_filters()
    # Kaldi reads 16-bit integers
    energies = audio_utils.spectrogram(
        np.asarray(samples, np.float64) * 2**15, window, frame_length=WINDOW, hop_length=HOP,
        fft_length=512, power=2.0, center=False, preemphasis=0.97, mel_filters=bands,
        log_mel="log", mel_floor=np.finfo(np.float32).eps.item(), remove_dc_offset=True)
    return energies.T.astype(np.float32)


def sound_slice(samples, draw=None):
    """One slice of a sound.

    Args:
        samples: (n,) in -1..1 at 16 kHz; None = no sound, whose slice is zeros, as in VAST.
        draw: number in 0..1 that chooses the slice; None = the middle one.
    Returns: (1024, 64) float32, normalised; zeros behind the end. As in VAST, a sound that fills
        its slices exactly has one more, which is empty.
    """
    padded = np.zeros((SLICE_LENGTH, BANDS), np.float32)
    if samples is None:
        return torch.from_numpy(padded)
    num_windows = max(0, 1 + (len(samples) - WINDOW) // HOP)
    num_slices = num_windows // SLICE_LENGTH + 1
    if draw is None:
        number = (num_slices + 1) // 2 - 1
    else:
        number = int(draw * num_slices)
    first = number * SLICE_LENGTH * HOP
    last = first + (SLICE_LENGTH - 1) * HOP + WINDOW
    bank = (filter_bank(samples[first:last]) - MEAN) / TWO_DEVIATIONS         # (windows, 64)
    padded[:len(bank)] = bank
    return torch.from_numpy(padded)
