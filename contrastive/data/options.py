"""How a data set is opened: one field for each flag of a script that concerns data."""

import dataclasses

HELD_OUT_FRACTION = 0.05  # part of train that is held out for a split which the data lack


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """How a data set is opened: one field for each flag of a script that concerns data.

    A field at its default is a flag that is not given. Options cannot be changed, since opened
    data sets are cached by their options; `replace` returns other ones.
    """

    # ---- of any data set ----
    # Frames of a clip. 0 = the data set's own number: 12 of a video, 4 of moving-emoji.
    frames: int = 0
    # Frames of a clip of val and test. 0 = as many as in training.
    eval_frames: int = 0
    # What is read of a clip: letters of v (frames), a (sound) and s (subtitle).
    modalities: str = "v"
    # Times of these frames: "uniform" (also ""), "middle" or "random"; see frames.read_frames.
    frame_sampling: str = ""
    # Folder that keeps the decoded frames of each clip. "" = none.
    frame_cache: str = ""
    # Side of an image in pixels. 0 = the data set's own: 224 of files, 32 of moving-emoji.
    image_size: int = 0
    # Boxes of a frame, for an encoder of regions.
    regions: int = 0
    # Folder of the videos. "" = data_dir.
    video_dir: str = ""
    # Part of train that becomes val, and of the user's data test, where they are missing.
    # 0 = HELD_OUT_FRACTION of the user's data, nothing of a data set by name.
    holdout_fraction: float = 0.0

    # ---- of the training set, and of any file of the user ----
    # Columns of a table, or extensions in a tar. "" = the first usual name.
    image_column: str = ""
    caption_column: str = ""
    label_column: str = ""

    # ---- of the training set alone ----
    # Folder of the annotation files, and where relative paths begin.
    data_dir: str = ""
    # Folders of precomputed features that are read in place of videos.
    feature_dir: tuple = ()
    # Folder of the features of regions.
    region_dir: str = ""
    # Commit, branch or tag of a repository on the hub.
    revision: str = ""
    # Whether each (image, caption) is a training example of its own.
    unfold_captions: bool = False
    # File with further captions of the training examples.
    extra_captions: str = ""
    # Part of the training examples that get another one's captions, 0..1.
    caption_noise: float = 0.0
    # Train on a random sentence with a relevancy above this (EPIC-KITCHENS-100). 0 = off.
    caption_relevancy: float = 0.0

    # ---- of the training set alone: the long tail that is cut from it (long_tail.py) ----
    # Ratio of the largest to the smallest class. None = the data set's own ratio.
    imbalance_ratio: float | None = None
    # Seed of the classes' order of size and of the images that stay.
    split_seed: int = 0
    # Lists of the images of each split.
    index_file: str = ""
    val_file: str = ""
    test_file: str = ""
    few_shot_file: str = ""

    # ---- of the data sets whose entry in registry.py has a flag of this name ----
    clips: tuple = (2000, 300, 300)
    scenes: tuple = (500, 10, 25)
    class_names: str = "wordnet"
    prompts: str = "openai"

    # ---- not flags ----
    # Whether the method reads classes and no captions: of emoji, drawings of each class are split.
    by_class: bool = False
    # Whether rows of the user's data that have no split are its test split, not its train split.
    test_as_whole: bool = False
    # Whether a test split that the user's data lack is held out of train.
    hold_out_test: bool = True

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):  # as argparse makes it; a cache needs a tuple
                object.__setattr__(self, field.name, tuple(value))

    @classmethod
    def from_args(cls, args):
        """The options that the flags of `args` give; fields without a flag have their default."""
        values = {}
        for field in dataclasses.fields(cls):
            value = getattr(args, field.name, None)
            if value is not None:
                values[field.name] = value
        return cls(**values)

    def without(self, names):
        """These options with the defaults of some fields."""
        defaults = DataOptions()
        return self.replace(**{name: getattr(defaults, name) for name in names})

    def replace(self, **changes):
        """These options with other values of some fields."""
        return dataclasses.replace(self, **changes)
